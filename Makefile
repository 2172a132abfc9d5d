# make setup · demo · test · lint · docs · clean
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

.PHONY: setup demo test lint docs clean

setup: $(STAMP)

# Installs once, and again only when the dependencies change.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/ridgeline ablate examples/quickstart.toml

test: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python -m ridgeline.docs
	@if test -x $(BIN)/mkdocs; then $(BIN)/mkdocs build; \
	else echo "mkdocs is not installed: $(BIN)/pip install -c constraints.txt -e '.[docs]', then make docs"; fi

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/catalogue.md
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
