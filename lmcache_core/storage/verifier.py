"""The verifier: one thread that checks frames as they arrive, while the next ones are still being read."""

from __future__ import annotations

from lmcache_core.storage.serial import SerialThread


class Verifier(SerialThread):
    """Runs checks. Shared by all tiers."""

    def __init__(self) -> None:
        super().__init__("lmcache-verifier")
