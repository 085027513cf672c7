# `make demo` and `make test` need python3 (3.10 or newer) and nothing else; both install into .venv with pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OVERLAY := $(VENV)/lightning24
NEMO := .venv-nemo
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
# More arguments for the command that a target runs, e.g. make demo ARGS="--bins 2d", make test ARGS="-k bins".
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint test-lightning24 test-icefall test-nemo clean clean-demo

help:
	@echo "make demo              train a small speech recogniser on the CPU, calibration included"
	@echo "make test              run the tests"
	@echo "make lint              style, types and import contracts"
	@echo "make test-lightning24  run the Lightning tests with Lightning 2.4 and omegaconf 2.3"
	@echo "make test-icefall      run the tests of the recipe for plain loops in integrations/icefall"
	@echo "make test-nemo         run the tests of the NeMo plugin in an environment of its own (2.2 GB, seven minutes)"
	@echo "make clean-demo        remove what make demo made, so that it starts anew"
	@echo "make clean             remove what these targets made"

# Waiting threads that spin slow a busy machine down, so they sleep.
demo: $(VENV)/.demo
	@OMP_WAIT_POLICY=passive $(BIN)/python examples/train_asr.py --device cpu --output demo_output --cache demo_output/profiles $(ARGS)

# Two at a time: the slow tests start several processes of their own and wait for them.
test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test-lightning24: $(OVERLAY)/.installed
	@PYTHONPATH=$(OVERLAY) $(BIN)/python -c "import lightning; assert lightning.__version__ == '2.4.0', lightning.__file__"
	@PYTHONPATH=$(OVERLAY) $(BIN)/python -m pytest tests/test_lightning*.py tests/test_examples.py -k lightning $(ARGS)

test-icefall: $(VENV)/.dev
	@$(BIN)/python -m pytest integrations/icefall $(ARGS)

test-nemo: $(NEMO)/.installed
	@cd integrations/nemo && OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive ../../$(NEMO)/bin/python -m pytest -n 2 $(ARGS)

clean-demo:
	rm -rf demo_output

clean:
	rm -rf $(VENV) $(NEMO) demo_output build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 10) or sys.exit('Python must be 3.10 or newer, this is ' \
	    + sys.version.split()[0] + '; name another one with make PYTHON=...')"
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing lhotse-oomfit for the demo (torch is large: this takes some minutes, once)"
	@$(PIP_INSTALL) -c constraints.txt -e ".[lightning]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing lhotse-oomfit and its development tools (torch is large: this takes some minutes, once)"
	@$(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.demo

# Only what differs, laid over .venv: the rest, torch above all, is the same.
$(OVERLAY)/.installed: $(VENV)/.dev Makefile
	@echo "Installing Lightning 2.4 and omegaconf 2.3 into $(OVERLAY)"
	@rm -rf $(OVERLAY)
	@$(PIP_INSTALL) --no-deps --target $(OVERLAY) lightning==2.4.0 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3
	@touch $@

# NeMo pins older versions of Lightning and omegaconf than the rest is developed with.
$(NEMO)/.installed: pyproject.toml integrations/nemo/pyproject.toml
	@echo "Installing NeMo into $(NEMO) (2.2 GB: this takes some minutes, once)"
	@$(PYTHON) -m venv $(NEMO)
	@$(NEMO)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 'nemo-toolkit[asr]==3.0.0'
	@$(NEMO)/bin/python -m pip install -qq --disable-pip-version-check -e . -e 'integrations/nemo[test]'
	@touch $@
