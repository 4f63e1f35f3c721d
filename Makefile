# `make train` and `make test` do all set-up on a fresh machine. `make help` lists the rest.
# Variables: PYTHON, the interpreter the environment is made with; ARGS, passed on to the trainer or to pytest; JOBS, how
# many processes run tests: one more than there are cores, as they often wait for ranks and compilers of their own.

PYTHON ?= python3
ARGS ?=
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The release that CI runs. pyproject.toml says which others work.
TORCH := torch==2.13.0
SOURCES := $(wildcard simplefsdp inductor_passes tests benchmarks)

.DEFAULT_GOAL := help
.PHONY: help train test lint format clean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

train: $(VENV)/installed-train ## Train a small Llama on this machine; options in ARGS="--steps 100"
	@$(BIN)/simplefsdp train $(ARGS)

test: lint ## Check style and types, then run the tests; pytest options in ARGS="-k name"
	@echo "== pytest"
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/installed-dev ## Check style and types
	@echo "== ruff"
	@$(BIN)/python -m ruff check $(SOURCES)
	@$(BIN)/python -m ruff format --check $(SOURCES)
	@echo "== mypy"
	@$(BIN)/python -m mypy

format: $(VENV)/installed-dev ## Rewrite the sources in the project's style
	@$(BIN)/python -m ruff check --fix $(SOURCES)
	@$(BIN)/python -m ruff format $(SOURCES)

clean: ## Remove caches and build output; keeps .venv and runs
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The files below mark finished steps, so that each is done once per change of pyproject.toml.

$(VENV)/installed-torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than 3.10; choose another: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "== installing $(TORCH) into $(VENV) (once, some minutes)"
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/installed-train: $(VENV)/installed-torch pyproject.toml
	@echo "== installing simplefsdp[train]"
	@$(PIP) install -e '.[train]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-torch pyproject.toml
	@echo "== installing simplefsdp[train,dev]"
	@$(PIP) install -e '.[train,dev]'
	@touch $@ $(VENV)/installed-train
