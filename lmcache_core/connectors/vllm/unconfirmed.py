"""Loads whose end the scheduler hasn't heard of yet: vLLM shares their blocks at once, filled or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PATIENCE_STEPS = 64
"""For a step's report: many more than vLLM has under way at the same time."""


@dataclass(frozen=True, slots=True)
class _Loading:
    step: int
    request: Any
    first: int
    """The first token that is loaded."""


class Unconfirmed:
    """What requests load in steps that aren't confirmed. For one thread.

    With its prefix cache on, vLLM takes the blocks of a load for computed as soon as it is planned. Should
    the load fail, only the request that it was for computes them again: another one that shares them reads
    what was never filled where the first is aborted, preempted, or computed in smaller pieces meanwhile.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._loading: list[_Loading] = []

    def add(self, step: int, request: Any, first: int) -> None:
        """In `step` the request's tokens from `first` on are loaded. Counts also when the request is gone."""
        self._loading.append(_Loading(step, request, first))

    def settle(self, confirmed: int, now: int) -> None:
        """Forgets the steps up to `confirmed`, and those that nobody will report any more in step `now`."""
        if self._loading:
            until = max(confirmed, now - PATIENCE_STEPS)
            self._loading = [each for each in self._loading if each.step > until]

    def shared_by(self, request: Any, num_local: int) -> bool:
        """Whether the request's first `num_local` tokens, which vLLM counts as computed, hold some of it."""
        return any(
            each.first < num_local and self._name(each.request, each.first) == self._name(request, each.first)
            for each in self._loading
        )

    def _name(self, request: Any, first: int) -> object:
        """vLLM's hash of all tokens to the end of the block at `first`; it has one a block."""
        return request.block_hashes[first // self._block_tokens]
