# make setup · demo · test · lint · docs · web · gpu · clean; before a release: test-all · test-cpus · test-matrix · test-peers
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

.PHONY: setup demo test test-all test-cpus test-matrix test-peers lint docs web gpu gpu-wheels clean

setup: $(STAMP)

# Installs once, and again only when the dependencies change.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/ridgeline ablate examples/quickstart.toml

# Each process runs its part in order, so that what the tests of a file share is made once, and then helps the others.
# Tests wait for processes, servers and time limits in turns: three of them keep two cores busy.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

test: setup
	$(PYTEST)

# Every crossing of techniques, families and options, of which `make test` runs a part.
test-all: setup
	$(PYTEST) -m '' --hypothesis-profile nightly

# What depends on the processor, as other processors and busy ones would run it.
test-cpus: setup
	$(BIN)/python tests/cpus.py

# Every Python and the oldest PyTorch that are supported, as far as they are at hand.
test-matrix: setup
	$(BIN)/python -m pip install -c constraints.txt nox
	$(BIN)/nox

# Tests beside optional packages that take long to install: bitsandbytes, DeepSpeed, lm-eval, Ray, client libraries.
test-peers: setup
	$(BIN)/python -m pip install -c constraints.txt nox
	$(BIN)/nox -s peers clients

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python -m ridgeline.docs
	@if test -x $(BIN)/mkdocs; then $(BIN)/mkdocs build --strict; \
	else echo "mkdocs is not installed: $(BIN)/pip install -c constraints.txt -e '.[docs]', then make docs"; fi

# The page of `ridgeline web`, which is kept in the repository so that users need no Node.
web:
	cd web && npm ci && npm run build

# Everything measured on this machine's GPU, beside its predictions, in parts of at most nine minutes. What is in the
# folder already is not measured again. On a machine without the packages: make gpu PYTHON=python3 WHEELS=wheels
GPU_RESULTS ?= gpu-results
WHEELS ?=
ANY_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(ANY_PYTHON) benchmarks/gpu/campaign --out $(GPU_RESULTS) $(if $(WHEELS),--wheels $(WHEELS)) $(GPU)

# Wheels of what a bare machine with PyTorch, Triton and transformers lacks, for Python 3.12 on x86-64.
gpu-wheels:
	$(ANY_PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  $(foreach v,2_17 2_27 2_28 2_31 2_34,--platform manylinux_$(v)_x86_64) --platform manylinux2014_x86_64 \
	  -c constraints.txt -d wheels pydantic pydantic-core annotated-types typing-inspection tomli-w fastapi starlette \
	  uvicorn llguidance opentelemetry-api annotated-doc anyio click h11

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/architecture.md docs/catalogue.md docs/prediction-cards.md docs/studies docs/techniques
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
