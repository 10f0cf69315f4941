# Needs nothing but make and Python 3.11, 3.12 or 3.13. Everything is installed into .venv, from requirements.lock.
# pip's own settings apply; where torch's CPU build is on another index, say PIP_EXTRA_INDEX_URL=... make quickstart

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)
UNNEEDED := torchvision torchaudio torchcodec
BIN := .venv/bin
ARGS ?=

.PHONY: help quickstart test install lint format format-check type docs bench lock clean

help:
	@echo 'make quickstart   train the quickstart model with 3 generators and 1 learner (ARGS="..." adds options)'
	@echo 'make test         run the tests (ARGS="..." adds pytest options)'
	@echo 'make install      make .venv only; the others do that when it is missing or out of date'
	@echo 'make lint | type | format | docs | bench | lock | clean'

quickstart: install
	$(BIN)/streamrl launch --generators 3 --learner 1 --config configs/quickstart.yaml $(ARGS)

test: install
	@$(BIN)/python -m pytest $(ARGS)

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11, 3.12 or 3.13 with venv and ensurepip; set PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[cpu,dev]'
	$(BIN)/pip uninstall --quiet --yes $(UNNEEDED)
	@touch $@

lint: install
	$(BIN)/ruff check

format: install
	$(BIN)/ruff format

format-check: install
	$(BIN)/ruff format --check

type: install
	$(BIN)/mypy

docs: install
	$(BIN)/python -m streamrl.config_reference > docs/configuration.md

bench: install
	@for benchmark in $(wildcard bench/bench_*.py); do $(BIN)/python "$$benchmark" $(ARGS) || exit 1; done

lock: install
	@{ sed -n '/^#/p' requirements.lock; $(BIN)/pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > .lock.new
	@mv .lock.new requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
