# On a fresh machine `make demo` and `make test` do everything: environment, installation, and then theirs.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := $(VENV)/installed
DEMO_STAMP := $(VENV)/installed-for-demo

# Two processes of two threads each share two cores: a thread that waits must not spin.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2

.PHONY: demo check test test-all sanitize sanitize-threads lint clean

# The demo needs a part of the packages only, unless everything is installed already.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/hypermlp demo

# The two-minute tier for daily work: lint, types and the fastest nine tenths of the tests.
check: lint
	$(PYTEST) -m "not slow and not thorough"

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ""

# Run the native kernels under the address and undefined-behaviour sanitizers of g++, over the shapes of the contract.
# TESTS="-k ..." restricts it.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
SANITIZED := tests/ops/test_native.py tests/ops/test_contract.py tests/layers
TESTS ?= -k "not compile and not blocked and not reference"
sanitize: export CXX := g++
sanitize: export HYPERMLP_CACHE := $(CURDIR)/$(VENV)/sanitized
sanitize: export HYPERMLP_CXXFLAGS := $(SANITIZERS)
sanitize: export ASAN_OPTIONS := detect_leaks=0
sanitize: $(STAMP)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest $(TESTS) $(SANITIZED)

# Run every kernel under the thread sanitizer of g++, driven by a C++ program: Python has races of its own.
CSRC := hypermlp/ops/csrc
sanitize-threads:
	mkdir -p $(VENV)
	g++ -std=c++17 -O1 -g -march=native -fopenmp-simd -fsanitize=thread -pthread -I$(CSRC) \
	tests/ops/threads.cpp $(filter-out %/ops.cpp,$(wildcard $(CSRC)/*.cpp)) -o $(VENV)/threads
	TSAN_OPTIONS=halt_on_error=1 $(VENV)/threads

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "installing PyTorch, transformers and matplotlib into $(VENV): about 1.6 GB on the disk, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on -c constraints.txt torch
	$(BIN)/pip install --progress-bar on -c constraints.txt -e '.[train,report]'
	touch $(DEMO_STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
