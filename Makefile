# make demo   sets everything up and runs the main job: a tiny model, real conversations, hidden states, recomputed
# make test   sets everything up and runs every test

PYTHON ?= python3
VENV ?= .venv
# The newest torch that the tests were run with; the worker extra allows others.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup system demo test lint picture bench clean

help:
	@sed -n 's/^# make /make /p' Makefile

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: run make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) (about 2 GB with torch)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[worker,trainer,dev]'
	@# The trainer itself comes without its torchvision and torchaudio, which break every model class beside another torch.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --group trainer
	@touch $(INSTALLED)

# What the tests drive besides Python: a real sshd and a real terminal.
system:
	@sh .ci/system

# make lint   ruff, mypy --strict, the import contracts, Python 3.8 on the node side
lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/vermin --quiet -t=3.8- --eval-annotations dflash_tui/node

demo: setup
	@$(BIN)/dflash-tui demo

test: setup system
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
