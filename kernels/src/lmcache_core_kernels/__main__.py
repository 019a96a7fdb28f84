"""`python -m lmcache_core_kernels`: one line that says what was built."""

from __future__ import annotations

import sys

from lmcache_core_kernels import build_info

sys.stdout.write(f"{build_info()}\n")
