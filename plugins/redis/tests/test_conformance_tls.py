"""The same over TLS, to a server that asks for a certificate and knows its users."""

from __future__ import annotations

from lmcache_core_conformance import BackendConformance

from .harness import RepeatingHarness
from .servers import require
from .sites import TlsSite

BINARY = require("redis")


class TlsHarness(RepeatingHarness):
    def __init__(self) -> None:
        super().__init__(lambda settings: TlsSite(BINARY, settings))


class TestRedisOverTls(BackendConformance):
    harness = TlsHarness()
