# Every target makes the environment that it needs, and does nothing twice.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= plots
JOBS ?= 2
PROMPT ?= class Queue:

BIN := $(VENV)/bin
SOURCES := lra scripts tests
INSTALLED := $(VENV)/.installed-$(EXTRAS)
DEVELOP := $(VENV)/.installed-dev,plots,test
PYTEST := $(BIN)/pytest -n $(JOBS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart test test-slow lint format types check bench pictures clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) (add cuda or tpu with a comma) JOBS=$(JOBS)"

install: $(INSTALLED) ## put lra and what it needs into .venv

quickstart: install ## train, evaluate and sample a small model on this machine
	$(BIN)/lra train quickstart
	$(BIN)/lra eval quickstart --split test
	$(BIN)/lra generate quickstart --prompt "$(PROMPT)"
	@echo
	@echo "The run, with its checkpoints, metrics and resolved configuration: $(CURDIR)/runs/quickstart"
	@echo "Its configuration: $(CURDIR)/lra/configs/quickstart.gin"
	@echo "The command: $(CURDIR)/$(BIN)/lra --help"

test: $(DEVELOP) ## the tests that are not marked slow
	$(PYTEST) --timeout 300 -m "not slow" $(ARGS)

test-slow: $(DEVELOP) ## the tests that are marked slow
	$(PYTEST) --timeout 1800 -m slow $(ARGS)

lint: $(DEVELOP) ## ruff: faults and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(DEVELOP) ## ruff: mend what it can and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(DEVELOP) ## mypy
	$(BIN)/mypy

check: lint types test ## all that a change must pass

bench: $(INSTALLED) ## speed and memory of every pattern against length
	$(BIN)/lra bench --length 1024 2048 4096 8192 $(ARGS)

pictures: $(INSTALLED) ## draw all patterns again for the README
	$(BIN)/python scripts/pictures.py
	$(BIN)/python scripts/angular_hashing.py

clean: ## remove the environment, caches and builds; keep runs and corpora
	rm -rf build dist lra.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
	if [ -f $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi

# The stem is the list of extras, so another list is another stamp.
$(VENV)/.installed-%: setup.cfg pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@

# pip is the last thing that venv writes: an interrupted one is made again.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)': install Python 3.11 or later, or name one with 'make PYTHON=/path/to/python3'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1), and lra needs 3.11 or later: name one with 'make PYTHON=/path/to/python3'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' cannot make environments: install its venv module (on Debian: apt install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
