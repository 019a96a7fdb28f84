"""`python -m lmcache_core_kernels`: one line that says what was built."""

from __future__ import annotations

import sys

from lmcache_core_kernels import build_info

try:
    sys.stdout.write(f"{build_info()}\n")
except OSError as error:
    sys.exit(f"lmcache-core-kernels can't be used: {error}")
