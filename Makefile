# Everything runs in .venv, which the first target makes. `make help` lists the targets.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all compile-gate docs lint format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the package and what it needs into $(VENV), about a minute ..."
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(VENV)/.base  ## from raw French text to a small pretrained T5, under 8 minutes on 2 cores
	OMP_NUM_THREADS=$(JOBS) $(BIN)/fat5 quickstart --overwrite

test: lint  ## style, types and the tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-all: lint  ## the slow tests too
	$(BIN)/python -m pytest -n $(JOBS)

compile-gate: $(VENV)/.dev  ## compile every kernel for every card with every set of flags, without a GPU
	TRITON_INTERPRET=0 $(BIN)/python -m tests.ops.compile_gate --all --jobs $(JOBS)
	TRITON_INTERPRET=0 $(BIN)/python -m tests.ops.hopper_gate --all --jobs $(JOBS)

docs: $(VENV)/.dev  ## the documentation site into site/, strictly and without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and what the tools cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site
