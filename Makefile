# make demo   sets everything up and runs the main job: a tiny model, real conversations, hidden states, recomputed
# make test   sets everything up and runs every test but those on a real vLLM
# make test-vllm   puts vLLM for the CPU into an environment of its own (3.4 GB) and runs the tests on it

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
# The newest torch that the tests were run with; the worker extra allows others.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# As many at a time as there are cores; the tests of a file stay together, for they share what is costly to make.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile
# By name the quick files of tests/unit come last, so that the end waits for no long one.
IN_ORDER := --no-loadscope-reorder

# The tests start many programs of ours; each compiles itself anew where it may not keep that.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What the demo needs, and with it what the tests need.
WORKER := $(VENV)/.installed-worker
INSTALLED := $(VENV)/.installed
VLLM := $(VLLM_VENV)/.installed-vllm

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm system demo test test-vllm lint fidelity clean

help:
	@sed -n 's/^# make /make /p' Makefile

setup: $(INSTALLED)

setup-vllm: $(VLLM)

$(WORKER): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: run make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) (about 2 GB with torch)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) '$(TORCH)'
	@$(PIP) --editable '.[worker]'
	@touch $(WORKER)

$(INSTALLED): $(WORKER)
	@echo "adding the trainer and the tests' tools"
	@$(PIP) --editable '.[worker,trainer,dev]'
	@# The trainer itself comes without its torchvision and torchaudio: beside another torch they break every model class.
	@$(PIP) --no-deps --group trainer
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

demo: $(WORKER)
	@$(BIN)/dflash-tui demo

# tests/vllm is among the norecursedirs of pyproject.toml: only test-vllm, which names it, collects it.
test: setup system
	@$(BIN)/python -m pytest $(PARALLEL) $(IN_ORDER) $(PYTEST_ARGS)

# The tests themselves run in $(VENV); of the other environment they start `vllm serve`, as a node's own.
test-vllm: setup setup-vllm
	@sh .ci/system vllm
	@DFLASH_TUI_TEST_VLLM=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm $(PARALLEL) $(PYTEST_ARGS)

$(VLLM): tests/vllm/cpu/install.py $(wildcard tests/vllm/cpu/plugin/*.py tests/vllm/cpu/plugin/*.toml)
	@echo "setting up $(VLLM_VENV) (3.4 GB)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python tests/vllm/cpu/install.py '$(TORCH)'
	@touch $(VLLM)

# make fidelity   every family against the plain forward, and sabotages that must be noticed, as a table
fidelity: $(WORKER)
	@$(BIN)/python -m tests.fidelity

clean:
	rm -rf $(VENV) $(VLLM_VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
