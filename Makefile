# The two commands of the README are `make demo` and `make test`; everything they need, they install.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo sandbox test test-slow test-all test-kernels test-browser test-clients lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# torch comes first and exactly, so that nothing later pulls another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparrow needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt torch numpy
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[dev,math,parquet,notebook,serve,client,ray,code,wasm,envs]'
	@touch $@

demo: $(STAMP)  ## the whole idea in minutes on a CPU: calibrate, plan, train, one page
	$(BIN)/sparrow demo

# One process per core, one thread each; a file's tests stay together and share their fixtures.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --durations=15

# The sandbox of programs; on Debian as root it is installed, elsewhere its tests are skipped.
sandbox:
	@command -v bwrap >/dev/null || { apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends bubblewrap; } || true

test: $(STAMP) sandbox  ## the tests that fit into minutes
	$(PYTEST) --timeout=300 -m "not slow and not browser and not clients"

test-slow: $(STAMP) sandbox  ## training that helps, sweeps, commands of the documents but those that take minutes
	$(PYTEST) --timeout=600 -m "slow and not browser and not clients" -k "not take_minutes"

test-all: $(STAMP)  ## both, with more examples of every property
	$(PYTEST) --timeout=1800 --hypothesis-profile=thorough -m "not browser and not clients"

test-kernels: $(STAMP)  ## the GPU kernels without a GPU, in Triton's interpreter (installs triton)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt triton
	$(PYTEST) --timeout=900 tests/cpu/kernels

test-browser: $(STAMP)  ## the report in a real browser, headless (wants Chromium; on Debian as root it is installed)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[browser]'
	@$(BIN)/python tests/support/chromium.py 2>/dev/null || { apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends chromium; } || true
	@$(BIN)/python tests/support/chromium.py
	SPARROW_BROWSER=1 $(BIN)/python -m pytest --timeout=300 tests/browser

# Some clients need openai 2 and others 3: environments of their own, without torch.
CLIENTS := .venv-clients
CLIENT_KINDS := openai-2 openai-3 schemathesis

$(CLIENTS)/.installed: $(CLIENT_KINDS:%=tests/clients/%.txt)
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --progress-bar on uv
	set -e; for kind in $(CLIENT_KINDS); do \
	  $(CLIENTS)/bin/uv venv --clear --python $(CLIENTS)/bin/python $(CLIENTS)/$$kind; \
	  $(CLIENTS)/bin/uv pip install --python $(CLIENTS)/$$kind/bin/python -r tests/clients/$$kind.txt; \
	done
	@touch $@

test-clients: $(STAMP) $(CLIENTS)/.installed  ## the server with openai, litellm, openai-agents, inspect-ai, lm-eval, schemathesis
	SPARROW_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest --timeout=900 tests/clients

lint: $(STAMP)  ## ruff check, ruff format --check, mypy (of tests: calls and names that do not exist)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy --explicit-package-bases tests

format: $(STAMP)  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and every build output
	rm -rf $(VENV) $(CLIENTS) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
