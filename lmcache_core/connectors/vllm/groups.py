"""A model's attention groups: layers with blocks of their own, and which tokens' KV they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.identity import Content, NamedContent

NULL_BLOCK = 0
"""The id vLLM gives where a request has no block, because no window reaches there; its bytes are nobody's."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that attend alike and share a block table."""

    block_tokens: int
    window: int | None = None
    """How many tokens attention sees, the token itself included. None: all before it."""

    def first_needed(self, num_tokens: int) -> int:
        """The first token that the one behind `num_tokens` tokens attends to."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)

    def skipped(self, num_tokens: int, chunk_tokens: int) -> int:
        """Tokens, in whole chunks, that a hit of `num_tokens` doesn't need.

        A hit may leave its last token to compute, which attends to one token more than those behind it.
        """
        return self.first_needed(num_tokens - 1) // chunk_tokens * chunk_tokens

    def needed(self, content: Content, num_tokens: int) -> NamedContent:
        """What a hit of `num_tokens` needs, by name: to look it up or bring it near."""
        names = NamedContent.of(content, num_tokens)
        chunks = self.skipped(num_tokens, content.model.chunk_tokens) // content.model.chunk_tokens
        tails = names.tail_hashes_after(names.num_chunks)
        return NamedContent(content.model, names.hashes[chunks:], tails)


def blocks_at_most(groups: Sequence[Group], num_tokens: int) -> int:
    """How many blocks a request of `num_tokens` may take, with some tokens on top that are only guessed."""
    return sum(-(-num_tokens // group.block_tokens) + 1 for group in groups)


def common_block_tokens(groups: Sequence[Group]) -> int:
    """What every prefix that vLLM takes is a multiple of."""
    return math.lcm(*(group.block_tokens for group in groups))


def requests_wait(groups: Sequence[Group]) -> bool:
    """Whether a request waits until its load is confirmed, instead of being computed behind it at once.

    From what failed in a step vLLM computes again where all earlier blocks are still there, which is so
    for one group of full attention only. Elsewhere a request can only be taken back as a whole, while it
    waits. See docs/adr/0008.
    """
    return len(groups) > 1 or groups[0].window is not None
