"""Fixtures of several files."""

from __future__ import annotations

import importlib.util
import os

import pytest
from paged_kv import MOVERS

from lmcache_core.kernels import paged

# They launch compiled kernels on a stand-in for a device. In CI these must be there: the tests fail instead.
NEED_KERNELS = ["test_kernels_layers.py", "test_kernels_staging.py"]
INSTALLED = importlib.util.find_spec("lmcache_core_kernels") is not None
collect_ignore = [] if INSTALLED or os.environ.get("CI") == "true" else NEED_KERNELS


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the KV of a `PagedKV`: torch, and the compiled kernels where they are installed."""
    if request.param == "reference":
        monkeypatch.setattr(paged, "native_library", lambda: None)
    return request.param
