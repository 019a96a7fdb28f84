"""A request's paged blocks in one attention group, as the source of a store and the target of a retrieve."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.connectors.vllm.groups import NULL_BLOCK
from lmcache_core.connectors.vllm.memory import Blocks


class RequestBlocks:
    """The blocks, first token first; those that a window has left behind are null blocks.

    Null blocks are neither read nor written: what is gathered of them is zeros, which nobody loads. Of what
    is scattered only tokens `[first, end)` count.

    Raises:
        ValueError: a null block behind one that is none.
    """

    def __init__(
        self,
        blocks: Blocks,
        block_tokens: int,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._block_ids = block_ids
        self._real = next((i for i, block in enumerate(block_ids) if block != NULL_BLOCK), len(block_ids))
        if NULL_BLOCK in block_ids[self._real :]:
            raise ValueError(f"null blocks in the middle of {list(block_ids)}")
        self._first = max(first // block_tokens, self._real)
        self._end = len(block_ids) if end is None else -(-end // block_tokens)

    @property
    def num_missing(self) -> int:
        """The tokens whose blocks are null: `[0, num_missing)`."""
        return self._real * self._block_tokens

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        start, stop = self._span(first_token, num_tokens)
        low = min(max(start, self._real), stop)
        nbytes = (low - start) * self._blocks.block_nbytes
        for segment in payload if nbytes else ():
            segment[:nbytes] = bytes(nbytes)
        if low < stop:
            self._blocks.gather(self._block_ids[low:stop], [segment[nbytes:] for segment in payload])

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
