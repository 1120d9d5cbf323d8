# On a fresh machine `make demo` and `make test` do everything: environment, installation, and then theirs.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := $(VENV)/installed

.PHONY: demo test test-all sanitize lint clean

demo: $(STAMP)
	$(BIN)/hypermlp demo

test: lint
	$(BIN)/python -m pytest

test-all: lint
	$(BIN)/python -m pytest -m ""

# The native kernels under the address and undefined-behaviour sanitizers, over the contract's shapes.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
sanitize: $(STAMP)
	HYPERMLP_CACHE=$(CURDIR)/$(VENV)/sanitized HYPERMLP_CXXFLAGS="$(SANITIZERS)" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -k "not compile and not blocked and not reference" tests/ops/test_contract.py tests/layers

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
