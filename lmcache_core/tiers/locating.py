"""Where frames are: which tiers hold which of a request's keys, nearest first."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.identity.keys import StorageKey
from lmcache_core.tiers.requests import Deadlines, Run, Tier


def locate(
    keys: Sequence[StorageKey],
    tiers: Sequence[Tier],
    deadlines: Deadlines,
    start: int = 0,
) -> list[Run]:
    """The runs that together cover the longest prefix of `keys[start:]` held by the union of tiers."""
    runs: list[Run] = []
    position = start
    while position < len(keys):
        for rank, tier in enumerate(tiers):
            length = tier.prefix_length(keys, position, deadlines.of(tier))
            if length:
                stop = _stop_where_nearer(keys, position, position + length, tiers[:rank])
                runs.append(Run(tier, position, stop))
                position = stop
                break
        else:
            break
    return runs


def find_first(keys: Sequence[StorageKey], tiers: Sequence[Tier], deadlines: Deadlines) -> Run | None:
    """The first of `keys`, in their order, that any tier holds. One question a tier."""
    found: Run | None = None
    for tier in tiers:
        wanted = keys if found is None else keys[: found.start]
        if not wanted:
            break
        held = tier.held(wanted, deadlines.of(tier))
        if True in held:
            position = held.index(True)
            found = Run(tier, position, position + 1)
    return found


def _stop_where_nearer(keys: Sequence[StorageKey], start: int, stop: int, nearer: Sequence[Tier]) -> int:
    """The first position after `start` that a nearer tier holds, else `stop`."""
    for tier in nearer:
        for position in range(start + 1, stop):
            if tier.contains(keys[position]):
                stop = position
                break
    return stop
