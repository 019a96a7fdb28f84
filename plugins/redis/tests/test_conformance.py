"""The Redis tier keeps every property of the conformance suite, over a real Redis."""

from __future__ import annotations

from lmcache_core_conformance import BackendConformance

from .harness import PINS, SiteHarness
from .servers import require
from .sites import Site

BINARY = require("redis")


class RedisHarness(SiteHarness):
    def __init__(self) -> None:
        super().__init__(lambda settings: Site(BINARY, settings), PINS)


class TestRedis(BackendConformance):
    harness = RedisHarness()
    # Less than its report is made with: three more sites are tried as well, and the machine may be busy.
    harness.examples, harness.interruptions = 15, 60
    harness.slack_s = 10.0
