# What there is to type. `make help` lists it; CI runs `make test` and nothing else.
#
# Needs Python 3.11 with pip, and make. Everything else goes into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
DEMO_DIR ?= .demo
PYTEST_FLAGS ?= -n 3 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo stop test test-vllm test-all vllm-setup check format docs bench conformance-setup conformance conformance-all triton-setup clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-installed ## From nothing to a streamed answer and its bill
	@DEMO_DIR=$(DEMO_DIR) $(BIN)/python tools/demo.py

stop: ## Stop the demo
	@if [ -x $(BIN)/modelyard ]; then $(BIN)/modelyard down --data-dir $(DEMO_DIR); else echo "Nothing to stop."; fi

test: check conformance-setup triton-setup ## Run every check and every test
	$(BIN)/pytest $(PYTEST_FLAGS)

test-vllm: vllm-setup ## Prove vLLM on this machine's CPUs
	MODELYARD_TEST_VLLM=1 $(BIN)/pytest -s tests/engines_vllm
	MODELYARD_TEST_VLLM=1 $(BIN)/pytest tests/conformance/test_engines.py tests/conformance/test_guests.py -k vllm

test-all: test test-vllm ## Run everything, the lane of vLLM too

vllm-setup: $(VENV)/.dev-installed ## Make vLLM's environment: 3.5 GB, once
	@$(BIN)/python tools/vllm_venv.py

check: $(VENV)/.dev-installed ## Lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-installed ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs-installed ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev-installed ## Gateway CPU per request, beside nginx
	$(BIN)/python -m bench.gateway

conformance-setup: $(VENV)/.dev-installed ## Fetch the suites of OpenAI and Anthropic and a fuzzer
	@$(BIN)/python tools/conformance.py suites

conformance: conformance-setup ## Run them against a platform
	$(BIN)/pytest tests/conformance/outside

conformance-all: $(VENV)/.dev-installed ## The same for longer, and clients that others wrote
	@$(BIN)/python tools/conformance.py all
	FUZZ_SECONDS=420 FUZZ_EXAMPLES=30 $(BIN)/pytest tests/conformance/outside

triton-setup: $(VENV)/.dev-installed ## Fetch a real Triton server, where this machine can run one
	@$(BIN)/python tools/pytriton.py

clean: stop ## Remove everything that was made here
	rm -rf $(VENV) $(DEMO_DIR) .cache build dist site

# --- the environment: each stamp is older than pyproject.toml when dependencies may have changed ---

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 is not installed."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11. Use: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "==> Making $(VENV)"
	@# Debian splits ensurepip off; pip itself can fill an environment then.
	@$(PYTHON) -m venv $(VENV) 2> /dev/null || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; }

$(VENV)/.demo-installed: pyproject.toml | $(VENV)/bin/python
	@echo "==> Installing Modelyard, llama.cpp and the openai SDK"
	@$(PIP) install -e '.[llamacpp]' openai==3.57.0
	@touch $@

$(VENV)/.dev-installed: pyproject.toml | $(VENV)/bin/python
	@echo "==> Installing the development tools"
	@$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/.demo-installed

$(VENV)/.docs-installed: pyproject.toml | $(VENV)/bin/python
	@$(PIP) install -e '.[docs]'
	@touch $@
