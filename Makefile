# make serve   the whole application on this machine: CPU, the shipped model, no Redis, no network
# make test    every test that runs without a GPU
# make help    the rest
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= serve_configs/dev.yaml
PORT ?= 8000
PYTEST_ARGS ?=
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup serve stop test test-fast test-cluster lint types format check bench

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[test,fast,video]'
	touch $@

setup: $(STAMP)  ## Create .venv and install everything into it

serve: $(STAMP)  ## Serve the shipped model on http://127.0.0.1:$(PORT), by default 8000 (Ctrl-C stops it)
	$(BIN)/python -m app.serve $(CONFIG) --port $(PORT)

stop: $(STAMP)  ## Shut a running application down, letting streams finish
	$(BIN)/python -m app.stop

test: $(STAMP)  ## The whole test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: $(STAMP)  ## Without the slow tests and those that start a cluster or a server
	$(BIN)/python -m pytest -m 'not slow and not serve and not redis and not cluster' $(PYTEST_ARGS)

test-cluster: $(STAMP)  ## What takes a cluster of several nodes: kills, roll-outs, down-scaling, shutting down (20 min)
	$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff: style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite to the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test  ## Everything that CI runs
