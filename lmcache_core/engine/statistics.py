"""Counts what happens, from events, so that a user can see it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

from lmcache_core.engine.results import TierStats
from lmcache_core.events import (
    BreakerChanged,
    Event,
    FrameRejected,
    Retrieved,
    StoreShed,
    TierDown,
    TierFailed,
)
from lmcache_core.tiers import MemoryTier, StorageTier


class Statistics:
    """An observer that keeps one counter per tier and kind of event; admissions the indexes count."""

    KINDS = (FrameRejected, StoreShed, TierFailed, BreakerChanged, TierDown, Retrieved)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._by_tier: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._last_error: dict[str, str] = {}

    def on_event(self, event: Event) -> None:
        with self._lock:
            match event:
                case FrameRejected():
                    self._by_tier[event.tier]["rejected"] += 1
                case StoreShed():
                    self._by_tier[event.tier][f"shed: {event.reason}"] += 1
                case TierFailed():
                    self._by_tier[event.tier][f"failed: {event.operation}"] += 1
                    self._last_error[event.tier] = event.reason
                case BreakerChanged() if event.state == "open":
                    self._by_tier[event.tier][f"{event.operation} breaker opened"] += 1
                case TierDown():
                    self._by_tier[event.tier]["down"] += 1
                    self._last_error[event.tier] = event.reason
                case Retrieved():
                    for tier, num_tokens in event.tokens_by_tier:
                        self._by_tier[tier]["tokens loaded"] += num_tokens

    def of(self, tier: MemoryTier | StorageTier, *, closed: bool) -> TierStats:
        """`closed`: what memory held is gone; a storage tier says what it holds for others."""
        index = tier.index.stats()
        configured = tier.configured_bytes if isinstance(tier, StorageTier) else None
        with self._lock:
            counters = {"admitted": index.admitted} | dict(self._by_tier[tier.name])
            last_error = self._last_error.get(tier.name, "")
        gone = closed and isinstance(tier, MemoryTier)
        counters |= {f"evicted: {reason}": count for reason, count in index.evicted.items()}
        return TierStats(
            name=tier.name,
            medium=tier.capabilities.medium if isinstance(tier, StorageTier) else "memory",
            state="down" if closed or (isinstance(tier, StorageTier) and not tier.usable) else "up",
            entries=0 if gone else index.entries,
            used_bytes=0 if gone else index.used_bytes,
            capacity_bytes=index.capacity_bytes if index.capacity_bytes is not None else configured,
            waiting_writes=tier.writes.depth() if isinstance(tier, StorageTier) else 0,
            counters=counters,
            last_error=last_error,
        )
