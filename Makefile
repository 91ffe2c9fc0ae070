# Everything a contributor runs. `make help` lists it. Nothing is installed outside .venv.
# README's two commands are `make setup && .venv/bin/gpunode run …` and `make test`.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NODE ?= p4d.24xlarge
SETTINGS ?= bottlerocket/examples/p4d-uniform.toml
# Two workers whatever the machine has: more only makes the tests that watch a clock wait for each other.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format types imports tables cover full bench baseline check clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install gpunode with its tools into it

$(STAMP): pyproject.toml
	@python=; \
	for name in python3 python3.13 python3.12 python3.11 python; do \
	  if "$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'make: no Python 3.11 or newer with its venv module here (Debian: apt-get install python3 python3-venv)' >&2; exit 1; \
	fi; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: setup ## run the daemon on a simulated node until Ctrl-C (NODE=…, SETTINGS=…)
	@echo 'try:  curl -s http://127.0.0.1:19400/healthz    (also /livez /readyz /status /metrics, and / in a browser)'
	@exec $(BIN)/gpunode run --simulate $(NODE) --sim-state .sim-$(NODE) --settings $(SETTINGS)

test: setup ## run the tests (those marked full apart)
	$(BIN)/python -m pytest -n $(WORKERS) -q

lint: setup ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## rewrite the code in the style that lint wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## check types
	$(BIN)/mypy

imports: setup ## check who may import whom
	$(BIN)/lint-imports

tables: setup ## check that the tables of GPUs and EC2 types say what the facts say
	$(BIN)/python packaging/generate_tables.py --check

cover: setup ## run the tests and hold the coverage gates: agent/mig and agent/settings 100 %, all 95 %
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n $(WORKERS) -q --cov --cov-report=
	$(BIN)/coverage report --include='agent/mig/*' --fail-under=100
	$(BIN)/coverage report --include='agent/settings/*' --fail-under=100
	$(BIN)/coverage report --fail-under=95

full: setup ## run the tests that take long or need packages of the system
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -q -m full

bench: setup ## measure, print a table, write bench-results.json, compare with the baseline
	$(BIN)/python -m tests.bench

baseline: setup ## measure and make the result the new baseline
	$(BIN)/python -m tests.bench --write-baseline

check: lint types imports tables test ## what a change must pass

clean: ## remove what was made here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis .coverage .coverage.* bench-results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
