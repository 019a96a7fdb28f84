"""The same over a cluster of three."""

from __future__ import annotations

from lmcache_core_conformance import BackendConformance

from .harness import RepeatingHarness
from .servers import require
from .sites import ClusterSite

BINARY = require("redis")


class ClusterHarness(RepeatingHarness):
    def __init__(self) -> None:
        super().__init__(lambda settings: ClusterSite(BINARY, settings))


class TestRedisCluster(BackendConformance):
    harness = ClusterHarness()
