# Each target does all its own set-up; what is installed already is not installed again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/digits_linear.yaml
BEST   := --ckpt_path best --trainer.default_root_dir runs/$(basename $(notdir $(CONFIG)))

.DEFAULT_GOAL := help
.PHONY: help install demo check test test-all faults lint bench bench-gpu reproduce-small docs clean

help:  ## Show what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## Make .venv and install lit-effattn into it.

demo: $(VENV)/.installed  ## Train on real digits, test, and draw samples (about 5 minutes on 2 cores).
	$(BIN)/lit-effattn fit --config $(CONFIG)
	$(BIN)/lit-effattn test $(BEST)
	$(BIN)/lit-effattn generate $(BEST) --n 64
	$(BIN)/lit-effattn generate $(BEST) --n 12 --complete 0.5

check: lint  ## Lint, check types, run a few tests of everything, compare tests' ids (under 2 minutes on 2 cores).
	$(BIN)/pytest -n 2 -m check -q
	$(BIN)/python -m tests.collection

test: lint  ## Lint, check types, run the tests.
	$(BIN)/pytest -n 2 --dist loadfile -m "not processes and not exhaustive" -q
	$(BIN)/pytest -m "processes and not exhaustive" -q

test-all: test  ## The tests, and those that go through every configuration and kind (40 minutes on 2 cores).
	$(BIN)/pytest -n 2 --dist loadfile -m "exhaustive and not processes" -q
	$(BIN)/pytest -m "exhaustive and processes" -q

faults: $(VENV)/.installed-dev  ## Kill and stop training runs, and compare the resumed runs (about 20 minutes on 2 cores).
	$(BIN)/python -m tests.faults --cells --kills 100

lint: $(VENV)/.installed-dev  ## Lint with ruff and check types with mypy.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## Measure what it costs, beside other libraries if they are there (5 minutes on 2 cores).
	$(BIN)/python -m benchmarks

bench-gpu: $(VENV)/.installed-dev  ## Measure what it costs on a GPU (under 9 minutes).
	$(BIN)/python -m benchmarks gpu

reproduce-small: $(VENV)/.installed-dev  ## Train the papers' figures in small; docs/reproduce.md gets them (two hours on 2 cores, resumable).
	$(BIN)/python -m benchmarks reproduce

docs: $(VENV)/.installed-docs  ## Build the documentation site into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Delete .venv, site/ and the caches (runs/ and data/ stay).
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $(PYTHON) is older than Python 3.10; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[docs]'
	@touch $@ $(VENV)/.installed
