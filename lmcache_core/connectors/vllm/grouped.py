"""One rank's cache: an engine for each attention group over the same tiers, looked up as one."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence

from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.engine import CacheEngine, LookupResult, Prefetch
from lmcache_core.errors import LMCacheError
from lmcache_core.identity import Content

log = logging.getLogger(__name__)

WINDOW_ATTEMPTS = 8
"""How many ends of a hit are tried until every window before one is there; each costs a lookup a group."""
POLL_S = 0.05


class GroupedCache:
    """A prefix counts as far as every group has what it needs of it: a window only its last tokens."""

    def __init__(self, groups: Sequence[Group], engines: Sequence[CacheEngine]) -> None:
        self.groups = tuple(groups)
        self.engines = tuple(engines)
        self.model = engines[0].model
        self.near = engines[0].memory_tiers
        self.mediums = {tier.name: tier.medium for tier in engines[0].stats().tiers}
        """Tier → medium, nearest first."""
        self.has_far_tiers = len(engines[0].config.tiers) > len(self.near)
        pairs = list(zip(self.groups, self.engines, strict=True))
        self._full = [engine for group, engine in pairs if group.window is None]
        self._windows = [(group, engine) for group, engine in pairs if group.window is not None]

    @property
    def full_parts(self) -> list[str]:
        """Digests of the parts that hold every token's KV."""
        return [engine.part.digest for engine in self._full]

    def hold(self, content: Content, limit: int) -> tuple[int, list[str]]:
        """Pins the longest prefix in memory, at most `limit` tokens: (tokens, the pins' lookup ids)."""
        return self._find(content, limit, self.near, pin=True)

    def release(self, lookup_ids: Sequence[str]) -> None:
        """Ends those pins."""
        for lookup_id in lookup_ids:
            try:
                self.engines[0].lookup_unpin(lookup_id)
            except LMCacheError as error:
                log.warning("a lookup's pins were gone before its end: %s", error)

    def bring_near(self, content: Content) -> Prefetch:
        """Starts bringing what the longest prefix needs into memory."""
        if len(self.engines) == len(self._full) == 1:
            return self.engines[0].prefetch(content)
        return Prefetch(self._bring(content))

    def close(self) -> None:
        """Writes what waits and closes the tiers. Idempotent."""
        for engine in self.engines:
            engine.close()

    def _bring(self, content: Content) -> Generator[tuple[str, int], None, None]:
        num_tokens, _ = self._find(content, content.num_tokens, None, pin=False)
        if not num_tokens:
            return
        under_way = [
            engine.prefetch(group.needed(content, num_tokens))
            for group, engine in zip(self.groups, self.engines, strict=True)
        ]
        try:
            for each in under_way:
                while not each.done:
                    each.wait(POLL_S)
                    yield "", 0  # where a cancelled prefetch ends
            skips = [group.skipped(num_tokens, self.model.chunk_tokens) for group in self.groups]
            longest = skips.index(min(skips))
            yield self.near[0], skips[longest]
            yield from under_way[longest].sources
        finally:
            for each in under_way:
                each.cancel()

    def _find(
        self, content: Content, limit: int, tiers: Sequence[str] | None, *, pin: bool
    ) -> tuple[int, list[str]]:
        def look(engine: CacheEngine, names: Content, most: int | None = None) -> LookupResult:
            return engine.lookup(names, search_range=tiers, limit=most, pin=pin, owner="vllm")

        chunk_tokens = self.model.chunk_tokens
        whole = [look(engine, content, limit) for engine in self._full]
        ids = [found.lookup_id for found in whole]
        ends = {found.num_tokens for found in whole} or {limit - limit % chunk_tokens}
        num_tokens = common_end(ends, chunk_tokens)
        for _ in range(WINDOW_ATTEMPTS):
            if not num_tokens:
                break
            wanted = [group.needed(content, num_tokens) for group, _ in self._windows]
            found = [look(engine, names) for (_, engine), names in zip(self._windows, wanted, strict=True)]
            missing = [
                names.num_tokens - result.num_tokens // chunk_tokens * chunk_tokens
                for names, result in zip(wanted, found, strict=True)
                if result.num_tokens < names.num_tokens
            ]
            if not missing:
                return num_tokens, [*ids, *(result.lookup_id for result in found)]
            self.release([result.lookup_id for result in found])
            num_tokens -= max(missing)  # to the end of the whole chunks before the first that is missing
        self.release(ids)
        return 0, []


def common_end(ends: set[int], chunk_tokens: int) -> int:
    """Where a prefix ends that reaches `ends` in several parts.

    A tail that one part has may lie inside another's longer chunk: whole chunks are what they share.
    """
    shortest = min(ends)
    return shortest if len(ends) == 1 else shortest - shortest % chunk_tokens
