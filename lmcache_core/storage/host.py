"""The host that a backend is opened with: facts about its tier, and the way to report lost copies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import MemoryPool
from lmcache_core.storage.faults import is_interrupt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHost:
    """Implements the contract's `Host`. What the tier's callbacks raise is logged: drivers never see it."""

    tier: str
    deadline_s: float
    max_in_flight: int
    capacity_bytes: int | None
    parts: tuple[str, ...]
    pool: MemoryPool
    on_lost: Callable[[Sequence[tuple[StorageKey, int | None]], str], None]
    on_lost_all: Callable[[str], None]

    def lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        try:
            self.on_lost(copies, reason)
        except BaseException as error:  # recorded boundary: the caller is a driver's thread
            if is_interrupt(error):
                raise
            log.exception("tier %s: forgetting lost copies failed", self.tier)

    def lost_all(self, reason: str) -> None:
        try:
            self.on_lost_all(reason)
        except BaseException as error:  # recorded boundary: the caller is a driver's thread
            if is_interrupt(error):
                raise
            log.exception("tier %s: forgetting everything failed", self.tier)
