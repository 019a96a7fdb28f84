"""The words in which a request speaks of tiers: policies, runs, deadlines, marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmcache_core.tiers.memory_tier import MemoryTier
from lmcache_core.tiers.storage_tier import StorageTier

Tier = MemoryTier | StorageTier
Marks = Mapping[str, int]
"""For each tier, by name, the moment at which a request began."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the config says about a tier's place in the chain."""

    write: bool
    """New frames are written here."""
    promote: str
    """When a frame loaded from here is kept in the nearer tiers: always, on_second_hit, never."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """`keys[start:stop]` of a request are held by `tier`, the nearest that has them."""

    tier: Tier
    start: int
    stop: int


class Deadlines:
    """When one request gives up on each tier, however often it turns to it. For one thread."""

    def __init__(self, policies: Mapping[str, Policy], clock: Callable[[], float]) -> None:
        self._policies = policies
        self._clock = clock
        self._until: dict[str, float] = {}

    def of(self, tier: Tier) -> float:
        """Absolute clock seconds."""
        until = self._until.get(tier.name)
        if until is None:
            until = self._until[tier.name] = self._clock() + self._policies[tier.name].deadline_s
        return until

    def extend(self, seconds: float) -> None:
        """Gives every tier that much more, for time that was spent elsewhere."""
        for name in self._until:
            self._until[name] += seconds
