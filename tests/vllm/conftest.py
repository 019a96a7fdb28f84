"""Tests with the real vLLM. They run in an environment of their own: `make test-vllm`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from vllm_session import Engine, save_llama

    @pytest.fixture(scope="session")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny Llama with random weights."""
        return save_llama(tmp_path_factory.mktemp("model") / "llama")

    @pytest.fixture(scope="session")
    def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """What vLLM prints; shown when it fails."""
        return tmp_path_factory.mktemp("vllm") / "vllm.log"

    @pytest.fixture(scope="session")
    def plain(model: Path, log: Path) -> Iterator[Engine]:
        """vLLM without a connector: the oracle."""
        with Engine(model, log) as engine:
            yield engine
