"""`python -m lmcache_core`: the command `lmcache-core`."""

from __future__ import annotations

from lmcache_core.cli.main import main

if __name__ == "__main__":
    main()
