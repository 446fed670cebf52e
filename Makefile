# make tune   tune a real model's geometry with whatever this machine has, and draw the report
# make test   the tests (those that need a GPU are skipped with a reason where there is none)
# make help   the rest

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
EXTRAS ?= tuning,dev
PLAN ?= tuning/plans/nemotron3-super.toml
TUNE_ARGS ?= --tp 1 --budget 225s
PYTEST_ARGS ?=
SANITIZE_ARGS ?=
COMPILE_ARGS ?=
ESTIMATE_ARGS ?=

comma := ,
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help venv tune estimates test test-gpu compile-shipped sanitize lint format clean

help:
	@echo 'make venv      create $(VENV) and install the project with constraints.txt and the extras [$(EXTRAS)]'
	@echo 'make tune      sweep PLAN=$(PLAN) with TUNE_ARGS=$(TUNE_ARGS), then draw the report'
	@echo 'make estimates make the estimated tables that the package brings anew, for the kernels in the tree; no GPU needed'
	@echo 'make test      run the tests'
	@echo "make test-gpu  run only the tests that need a GPU; with PYTEST_ARGS='-m two_gpus' those that need two"
	@echo 'make compile-shipped  compile every config that a shipped table names, for its target; no GPU needed'
	@echo 'make sanitize  run every kind of kernel under compute-sanitizer; needs a GPU and the tool'
	@echo 'make lint      ruff format --check, ruff check, mypy'
	@echo 'make format    let ruff format and fix'
	@echo 'make clean     remove caches and build output (not $(VENV))'
	@echo 'Settings: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) PLAN=$(PLAN) PYTEST_ARGS=$(PYTEST_ARGS)'

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or newer found; install one or say make PYTHON=/path/to/python …' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	sys.exit(0 if v >= (3, 11) else f"{sys.executable} is Python {v.major}.{v.minor}; 3.11 or newer is needed: make PYTHON=/path/to/python …")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV); a few minutes, longer where torch has to be downloaded'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

tune: venv
	$(BIN)/python -m replayssm_tuning sweep --plan $(PLAN) $(TUNE_ARGS)
	$(BIN)/python -m replayssm_tuning report

estimates: venv
	$(BIN)/python -m replayssm_tuning estimate-all $(ESTIMATE_ARGS)

# Two at a time, then those that hold processes to real seconds: alone.
test: venv
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not alone' $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS)

test-gpu: venv
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

compile-shipped: venv
	$(BIN)/python tests/compile_shipped.py $(COMPILE_ARGS)

sanitize: venv
	$(BIN)/python tests/sanitize.py $(SANITIZE_ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
