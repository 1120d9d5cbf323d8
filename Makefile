# On a fresh machine `make demo` and `make test` do everything: they make the environment, install, and run.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := $(VENV)/installed
DEMO_STAMP := $(VENV)/installed-for-demo

# Tools for releases and for the files of the repository, in an environment of their own.
TOOLS := $(VENV)/tools
TOOLS_STAMP := $(TOOLS)/installed
export ZIG ?= $(abspath $(TOOLS))/bin/python -m ziglang

# The builder of the site reads the sources and does not import them, so it needs neither PyTorch nor the package.
SITE := $(VENV)/site
SITE_STAMP := $(SITE)/installed
export SITE_PYTHON ?= $(abspath $(SITE))/bin/python

# Where several processes share the cores, a thread that waits must not spin (OMP_WAIT_POLICY).
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2

.PHONY: demo check test test-all fuzz wheels site checkpoints picture check-files sanitize sanitize-threads poison lint clean

# The demo needs a part of the packages only, unless everything is installed already.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	OMP_WAIT_POLICY=passive $(BIN)/hypermlp demo

# The two-minute tier for daily work: lint, types and the fastest nine tenths of the tests.
check: lint
	$(PYTEST) -m "not slow and not thorough"

test: lint
	$(PYTEST)

test-all: lint $(TOOLS_STAMP) $(SITE_STAMP) check-files
	$(PYTEST) -m ""

# The source archive, the wheel that builds its kernels on first use, and the wheels that contain kernels.
wheels: $(STAMP) $(TOOLS_STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	for target in linux-x86_64 linux-aarch64 macos-arm64; do \
	HYPERMLP_WHEEL=$$target $(BIN)/python -m hatchling build -t wheel -d dist || exit 1; done
	for wheel in dist/*manylinux*.whl; do $(TOOLS)/bin/auditwheel show --disable-isa-ext-check $$wheel || exit 1; done

# All documents, the API reference and the records, as pages that work from the disk: build/site/html/index.html.
site: $(SITE_STAMP)
	$(SITE_PYTHON) docs/site/build.py

# Train the two models in hypermlp/checkpoints again: about an hour on one core.
checkpoints: $(STAMP)
	for name in tiny tiny-softmax; do \
	OMP_NUM_THREADS=1 $(BIN)/hypermlp train $$name --out runs/$$name --resume && \
	$(BIN)/python -m hypermlp.train.publish runs/$$name hypermlp/checkpoints/$$name || exit 1; done

# The picture of README.md, from the cards of these models and from docs/results/bench-op.json.
picture: $(STAMP)
	$(BIN)/python docs/figures/overview.py

# Workflows, templates and the citation, against their schemas.
SCHEMA := $(TOOLS)/bin/check-jsonschema --builtin-schema vendor
check-files: $(TOOLS_STAMP)
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).citation-file-format CITATION.cff
	$(TOOLS)/bin/zizmor --offline --quiet .github/workflows

# Random cases against an independent oracle, wrong command lines, damaged files, malformed requests. It ends with
# status 1 if something was found; FUZZ="--seed 5 --parts operator" restricts it. See docs/reliability.md. Commands
# that are killed leave semaphores, which Python would report at the end.
MINUTES ?= 30
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -W ignore:resource_tracker -m fuzz run --minutes $(MINUTES) $(FUZZ)

# Run the native kernels under the address and undefined-behaviour sanitizers of g++, over the shapes of the contract.
# TESTS="-k ..." restricts it.
SANITIZERS := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
SANITIZED := tests/ops/test_native.py tests/ops/test_native_parallel.py tests/ops/test_contract.py tests/layers
TESTS ?= -k "not compile and not blocked and not reference"
sanitize: export CXX := g++
sanitize: export HYPERMLP_CACHE := $(CURDIR)/$(VENV)/sanitized
sanitize: export HYPERMLP_CXXFLAGS := $(SANITIZERS)
sanitize: export ASAN_OPTIONS := detect_leaks=0
sanitize: $(STAMP)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest $(TESTS) $(SANITIZED)

# Run the same tests on kernels whose new memory is filled with NaN: a value that is read before it is written shows.
poison: export HYPERMLP_CACHE := $(CURDIR)/$(VENV)/poisoned
poison: export HYPERMLP_CXXFLAGS := -DHYPERMLP_POISON
poison: $(STAMP)
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

$(TOOLS_STAMP): constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet -c constraints.txt ziglang auditwheel check-jsonschema zizmor
	touch $(TOOLS_STAMP)

$(SITE_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet -c constraints.txt 'zensical>=0.0.73' 'mkdocstrings-python>=2'
	touch $(SITE_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "installing PyTorch, transformers and matplotlib into $(VENV): 1.6 GB with the CPU build of PyTorch, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on -c constraints.txt torch
	$(BIN)/pip install --progress-bar on -c constraints.txt -e '.[train,report]'
	touch $(DEMO_STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
