"""The same over a real Valkey, with values of several pieces: a piece holds sixteen pages."""

from __future__ import annotations

from lmcache_core_conformance import BackendConformance, Harness

from .harness import RepeatingHarness
from .servers import require
from .sites import Site

BINARY = require("valkey")


class ValkeyHarness(RepeatingHarness):
    interruptions = Harness.interruptions  # pieces give calls more places to meet

    def __init__(self) -> None:
        super().__init__(lambda settings: Site(BINARY, settings), {"piece_bytes": 64 << 10})


class TestValkey(BackendConformance):
    harness = ValkeyHarness()
