"""What the scheduler's side asks of the cache: what is in memory now, and to bring in what isn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.identity import Content, ModelRecord


@dataclass(frozen=True, slots=True)
class Held:
    """The longest prefix that lies verified in memory, pinned there."""

    num_tokens: int
    lookup_ids: Sequence[Sequence[str]]
    """Each rank's, of all its attention groups."""


class Arrival(Protocol):
    """A prefix on its way into memory. It ends by itself."""

    @property
    def done(self) -> bool: ...

    @property
    def sources(self) -> Sequence[tuple[str, int]]:
        """(tier, tokens) from the first token on: where the prefix was found, as far as it is in memory.

        With several ranks, as the one says that ends last.
        """

    def wait(self, timeout_s: float | None = None) -> int: ...

    def cancel(self) -> None: ...


class Lookups(Protocol):
    """The caches of all ranks, as one. For one thread."""

    @property
    def model(self) -> ModelRecord: ...

    @property
    def mediums(self) -> Mapping[str, str]:
        """Tier → medium, nearest first."""

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
    """The one rank's cache is in this process."""

    several_ranks = False

    def __init__(self, cache: GroupedCache) -> None:
        self._cache = cache
        self.model = cache.model
        self.mediums = cache.mediums
        self.has_far_tiers = cache.has_far_tiers

    def hold(self, content: Content, limit: int) -> Held:
        num_tokens, lookup_ids = self._cache.hold(content, limit)
        return Held(num_tokens, (lookup_ids,))

    def release(self, held: Held) -> None:
        for lookup_ids in held.lookup_ids:
            self._cache.release(lookup_ids)

    def bring_near(self, content: Content) -> Arrival:
        return self._cache.bring_near(content)

    def close(self) -> None:
        """Nothing is open."""
