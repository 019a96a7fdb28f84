"""Where the package was not built, for lack of a C++ compiler, its tests are left out and a line says so."""

from __future__ import annotations

import importlib.util
import os

INSTALLED = importlib.util.find_spec("lmcache_core_kernels") is not None

# In CI it must be there: the tests then fail instead.
collect_ignore_glob = [] if INSTALLED or os.environ.get("CI") == "true" else ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if INSTALLED else "lmcache-core-kernels is not installed: its tests are left out"
