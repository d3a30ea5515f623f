# Everything that users and developers run. `make demo` and `make test` make the environment and build by themselves:
# they need Linux, Python 3.10+, a C++17 compiler and make.
#
# Programs of the environment are called as `.venv/bin/python -m ...`, by relative paths: a path with a space in it
# then works, where the scripts that pip installs would not.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# What must be there before pyproject.toml can be installed. Torch goes in first and alone, so that nothing else
# chooses another one. The other versions are in pyproject.toml. Without a GPU, PyTorch's build for the CPU is a tenth
# of the download: PIP_EXTRA_INDEX_URL=... make demo, with the index that PyTorch's install page names.
TORCH := torch==2.13.0
BUILD_TOOLS := setuptools==84.2.1 wheel==0.48.0 pybind11==3.1.0 cmake==4.4.4 ninja==1.13.2

PIP := $(PY) -m pip --disable-pip-version-check

# Each process that a test starts would compile every module of vdnn again if no bytecode were kept.
export PYTHONDONTWRITEBYTECODE :=

# Each of the two workers begins with one half of the files, so that what a file makes for all its tests is made once.
PYTEST := $(PY) -m pytest -n 2 --dist worksteal
CPP_FILES := find csrc tests deferred \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0

.PHONY: help
help:
	@echo "On a fresh machine, each makes .venv and builds by itself:"
	@echo "make demo         the main job: a small GPT under a budget beside plain PyTorch, then a page and a picture"
	@echo "make test         the tests; make test-full has the rest"
	@echo "For work on vdnn:"
	@echo "make test-fast    the tests without those marked slow"
	@echo "make test-torch   the tests that depend on torch, on another one: TORCH=torch==2.15.0 VENV=build/torch"
	@echo "make test-full    every sample of torch's operation database in every mode, every schedule and budget"
	@echo "make fuzz         100,000 random steps and 100,000 random trainings, each against plain PyTorch, bit for bit"
	@echo "make stress       the C++ stress program under ThreadSanitizer, AddressSanitizer and UBSan; stress-deferred"
	@echo "make stress-deferred  the runtime on the deferred accelerator under 10,000 seeds"
	@echo "make lint         ruff, mypy, clang-format, clang-tidy"
	@echo "make lint-quick   the same without clang-tidy: what the commit hooks run"
	@echo "make docs         the documentation as a site in build/site, warnings are errors"
	@echo "make bench        five minutes: with a GPU a measured comparison, without one vDNN's table in virtual time"
	@echo "make sweep        vdnn beside torch's own ways of saving memory, in virtual time: about two minutes"
	@echo "make bench-core   what a transfer and a hook cost"
	@echo "make bench-shapes steps whose shapes change, beside their own plans, in virtual time: ten minutes"
	@echo "make figures      the pytest-benchmark figures"
	@echo "make cuda-saves   a rehearsal's saves beside those of CUDA: TORCH=torch==2.11.0 (a CUDA build) VENV=build/torch-cuda"
	@echo "make gpu-proof    on a CUDA machine, with what is installed there: PART=checks, steps or zoo"
	@echo "make wheel-check  wheels without and with nvcc, in a bare environment and used by their commands"
	@echo "make build        build the native core in place; make venv: only make .venv; make clean"

$(VENV)/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "vdnn needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/with-torch: $(VENV)/made Makefile
	$(PIP) install $(TORCH)
	$(PIP) install $(BUILD_TOOLS)
	touch $@

# The core compiles while pip works, which has one core busy and waits for downloads. Both builds hold a lock (setup.py),
# so the one that pip asks for finds everything built. Bytecode of torch alone is made here: most of the other packages
# is never imported.
$(VENV)/with-everything: $(VENV)/made pyproject.toml setup.py Makefile
	$(PIP) install $(BUILD_TOOLS)
	VDNN_BUILD_TESTING=ON $(PY) setup.py --quiet build_ext --inplace & \
	  $(PIP) install $(TORCH) && \
	  VDNN_BUILD_TESTING=ON $(PIP) install --quiet --no-compile --no-build-isolation --editable '.[dev]' && wait $$!
	touch $(VENV)/with-torch $@

# Smaller environments, for the demo and for lint alone: without transformers, Lightning and the tests' packages.
$(VENV)/with-demo: $(VENV)/with-torch pyproject.toml setup.py
	$(PIP) install --quiet --no-build-isolation --editable '.[plan,report]'
	touch $@

$(VENV)/with-lint: $(VENV)/with-torch pyproject.toml setup.py
	$(PIP) install --quiet --no-build-isolation --editable '.[lint]'
	touch $@

# The environment of `make test` serves these too, once it is there.
HAS_EVERYTHING := $(wildcard $(VENV)/with-everything)

.PHONY: venv
venv: $(VENV)/with-everything

.PHONY: build
build: venv
	VDNN_BUILD_TESTING=ON $(PY) setup.py --quiet build_ext --inplace

.PHONY: demo
demo: $(if $(HAS_EVERYTHING),build,$(VENV)/with-demo)
	$(if $(HAS_EVERYTHING),,$(PY) setup.py --quiet build_ext --inplace)
	$(PY) -m benchmarks.demo

# Timings are off here: two workers disturb each other. `make figures` takes them.
.PHONY: test
test: build
	$(PYTEST) --benchmark-disable
	$(PYTEST) tests/deferred

# Trainers of other libraries are left out by their files: importing those takes longer than many tests.
TRAINERS := tests/integrations/test_huggingface.py tests/integrations/test_lightning.py

.PHONY: test-fast
test-fast: build
	$(PYTEST) --benchmark-disable -m "not slow and not full" $(TRAINERS:%=--ignore=%)
	$(PYTEST) -m "not slow and not full" tests/deferred

# What depends on the version of torch, for another one than the pinned: make test-torch TORCH=torch==2.15.0 VENV=build/torch
.PHONY: test-torch
test-torch: build
	$(PYTEST) --benchmark-disable tests/runtime tests/integrations tests/advisor tests/models $(TRAINERS:%=--ignore=%)

# All samples of torch's own operation and module databases, in every mode, moved and recomputed; the schedules and
# budgets that `make test` did not draw (tests/drawn.py); and ten times its seeds of the deferred accelerator.
.PHONY: test-full
test-full: build
	$(PYTEST) --benchmark-disable -m full
	VDNN_EXAMPLES=1 $(PYTEST) tests/planning
	VDNN_DEFERRED_SEEDS=200 $(PYTEST) -m "" tests/deferred

# Random steps and random whole trainings against plain PyTorch, bit for bit. `make test` runs 350 and 250 of them.
.PHONY: fuzz
fuzz: build
	$(PY) -m tests.fuzz.run --programs 100000 --workers 2
	$(PY) -m tests.fuzz.run --grammar training --programs 100000 --workers 2

.PHONY: figures
figures: build
	$(PY) -m pytest --benchmark-only

.PHONY: bench
bench: build
	$(PY) -m benchmarks.bench

.PHONY: sweep
sweep: build
	$(PY) -m benchmarks.sweep --quick --out build/sweep

.PHONY: bench-core
bench-core: build
	$(PY) -m benchmarks.core.transfers
	$(PY) -m benchmarks.core.hook_cost
	$(PY) -m benchmarks.core.host_time

.PHONY: bench-shapes
bench-shapes: build
	$(PY) -m benchmarks.shapes --json build/shapes.jsonl

.PHONY: stress
stress: venv
	bash .ci/stress $(PY) thread
	bash .ci/stress $(PY) address,undefined
	$(MAKE) stress-deferred

# Lives of graphs and streams of the user's, in small networks: about five minutes on two cores. `.ci/run` takes 1,000
# seeds of these, `make test` 20 of the tests that it draws, `make test-full` 200 of all.
VDNN_DEFERRED_SEEDS ?= 10000
.PHONY: stress-deferred
stress-deferred: build
	VDNN_DEFERRED_SEEDS=$(VDNN_DEFERRED_SEEDS) $(PYTEST) -m "" tests/deferred/test_vdnn_on_it.py \
	  -k "random and (life and linear or streams_of_the_users)"

# .pre-commit-config.yaml has the same, on the files that a commit changes.
.PHONY: lint-quick
lint-quick: $(if $(HAS_EVERYTHING),venv,$(VENV)/with-lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CPP_FILES) | xargs -0 $(PY) -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror

# clang-tidy reads the commands of the build; installing for lint alone builds too.
.PHONY: lint
lint: $(if $(HAS_EVERYTHING),build) lint-quick
	find csrc -name '*.cpp' -print0 | xargs -0 -n 1 -P 2 $(PY) -c 'from clang_tidy import clang_tidy; clang_tidy()' \
	  -p build/inplace --quiet --warnings-as-errors='*'

# From scratch each time: what is not read again warns of nothing.
.PHONY: docs
docs: build
	$(PY) -m sphinx -q -E -W --keep-going -b html docs build/site
	@echo "the site is in build/site/index.html"

# Without the environment on purpose: a CUDA machine has its own torch and, often, no network. Without make there:
# python3 -m benchmarks.gpu_proof checks
PART ?= checks
# What a rehearsal says that CUDA saves, beside torch's own CUDA operations. Needs a CUDA build of torch, but no GPU:
# make cuda-saves TORCH=torch==2.11.0 VENV=build/torch-cuda
.PHONY: cuda-saves
cuda-saves: build
	$(PY) -m benchmarks.cuda_saves

.PHONY: gpu-proof
gpu-proof:
	$(PYTHON) -m benchmarks.gpu_proof $(PART)

.PHONY: wheel-check
wheel-check: venv
	bash .ci/wheel $(PY) without-nvcc
	bash .ci/wheel $(PY) with-nvcc

.PHONY: clean
clean:
	rm -rf build dist vdnn.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks vdnn/_C.*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
