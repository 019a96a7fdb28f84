"""A request's paged blocks as the source of a store and the target of a retrieve."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.kernels import OpaqueBlocks


class RequestBlocks:
    """One request's blocks, first token first. Of what is scattered only tokens `[first, end)` count."""

    def __init__(
        self,
        blocks: OpaqueBlocks,
        block_tokens: int,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._block_ids = block_ids
        self._first = first // block_tokens
        self._end = len(block_ids) if end is None else -(-end // block_tokens)

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        start, stop = self._span(first_token, num_tokens)
        self._blocks.gather(self._block_ids[start:stop], payload)

    def scatter(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        start, stop = self._span(first_token, num_tokens)
        low, high = max(start, self._first), min(stop, self._end)
        if low < high:
            nbytes = self._blocks.block_nbytes
            part = slice((low - start) * nbytes, (high - start) * nbytes)
            self._blocks.scatter(self._block_ids[low:high], [segment[part] for segment in payload])

    def _span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        if first_token % self._block_tokens or num_tokens % self._block_tokens:
            raise ValueError(f"{num_tokens} tokens from {first_token} on are not whole blocks")
        return first_token // self._block_tokens, (first_token + num_tokens) // self._block_tokens
