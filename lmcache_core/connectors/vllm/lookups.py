"""What the scheduler's side asks of the cache: what is in memory now, and to bring in what isn't."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_core.engine import CacheEngine
from lmcache_core.errors import LMCacheError
from lmcache_core.identity import Content, ModelRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """The longest prefix that lies verified in memory, pinned there. Empty ids pin nothing."""

    num_tokens: int
    lookup_ids: Sequence[str]
    """One a rank."""


class Arrival(Protocol):
    """A prefix on its way into memory. It ends by itself."""

    @property
    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> int: ...

    def cancel(self) -> None: ...


class Lookups(Protocol):
    """The caches of all ranks, as one. For one thread."""

    @property
    def model(self) -> ModelRecord: ...

    @property
    def has_far_tiers(self) -> bool:
        """Whether `bring_near` can bring anything."""

    @property
    def several_ranks(self) -> bool:
        """Whether one rank can fail to load what another loads."""

    def hold(self, content: Content, limit: int) -> Held:
        """Pins the longest prefix, at most `limit` tokens, that every rank has in memory."""

    def release(self, held: Held) -> None:
        """Ends the pins of `held`."""

    def bring_near(self, content: Content) -> Arrival:
        """Starts bringing the longest prefix into memory."""

    def close(self) -> None: ...


class LocalLookups:
    """The one rank's engine is in this process."""

    several_ranks = False

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._near = engine.memory_tiers
        self.model = engine.model
        self.has_far_tiers = len(engine.config.tiers) > len(self._near)

    def hold(self, content: Content, limit: int) -> Held:
        found = self._engine.lookup(content, search_range=self._near, limit=limit, pin=True, owner="vllm")
        return Held(found.num_tokens, (found.lookup_id,))

    def release(self, held: Held) -> None:
        for lookup_id in held.lookup_ids:
            try:
                self._engine.lookup_unpin(lookup_id)
            except LMCacheError as error:
                log.warning("a lookup's pins were gone before its end: %s", error)

    def bring_near(self, content: Content) -> Arrival:
        return self._engine.prefetch(content)

    def close(self) -> None:
        """Nothing is open."""
