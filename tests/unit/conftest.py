"""Fixtures of several files."""

from __future__ import annotations

import pytest
from paged_kv import MOVERS

from lmcache_core.kernels import paged


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the KV of a `PagedKV`: torch, and the compiled kernels where they are installed."""
    if request.param == "reference":
        monkeypatch.setattr(paged, "native_library", lambda: None)
    return request.param
