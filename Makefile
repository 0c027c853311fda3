# make serve   the server on this machine: installs into .venv, fetches the small model, serve run deploy/config.yaml
# make test    all tests
# make check   what every commit passes: make lint, quick tests
# make lint    ruff, mypy, import order
# make clean   removes what these made here (the model's cache stays)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= deploy/config.yaml
# One worker per core, at most four; tests/conftest.py says which takes what.
PYTEST := $(BIN)/pytest -n auto
SOURCES := pyproject.toml $(wildcard kernels/csrc/*.cpp kernels/csrc/*.h kernels/csrc/CMakeLists.txt)

.PHONY: serve test check lint clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	@$(BIN)/chunkserve serve $(CONFIG)

test: $(VENV)/.dev
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow and not ray and not model and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.typing $(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "chunkserve needs Python 3.11 or later; set PYTHON=python3.x (this is `$(PYTHON) --version`)"; exit 1; }
	@echo "Making $(VENV)..."
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# What the server needs; a second start takes seconds, since the stamp is newer than its sources.
$(VENV)/.serve: $(VENV)/bin/python $(SOURCES)
	@echo "Installing chunkserve into $(VENV) (a few minutes the first time: torch, ray, and our C++ kernels)..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[model]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python $(SOURCES)
	@echo "Installing chunkserve and its test tools into $(VENV)..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
