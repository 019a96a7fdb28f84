"""Which tiers the tokens of a hit came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def split_by_tier(
    first: int, end: int, sources: Iterable[tuple[str, int]], mediums: Mapping[str, str]
) -> dict[str, int]:
    """How many of the tokens `[first, end)` each tier gave.

    `sources` are (tier, tokens) from token 0 on, as a prefetch found them. What they tell nothing of, or name
    no tier for, was in memory before: it counts for the first of `mediums` (tier → medium, nearest first)
    that is memory.
    """
    near = next((tier for tier, medium in mediums.items() if medium == "memory"), "memory")
    counts: dict[str, int] = {}
    position = 0
    for tier, num_tokens in (*sources, (near, end)):
        low, high = max(position, first), min(position + num_tokens, end)
        if low < high:
            counts[tier or near] = counts.get(tier or near, 0) + high - low
        position += num_tokens
    return counts
