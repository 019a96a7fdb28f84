"""An item's memory, found by the offset in its value."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from lmcache_core.sdk import View, host_memory

_SCRATCH_NBYTES = 1 << 16


class Memory:
    """The views of an item as one run of bytes. Let go of it before the item is settled."""

    def __init__(self, views: Sequence[View]) -> None:
        self._parts = [host_memory(view) for view in views]
        self._starts = [0, *accumulate(map(len, self._parts))]

    def part(self, offset: int, nbytes: int) -> list[memoryview]:
        """The memory of bytes `[offset, offset + nbytes)`, which lie inside."""
        parts = []
        at = bisect_right(self._starts, offset) - 1
        while nbytes:
            first = offset - self._starts[at]
            part = self._parts[at][first : first + nbytes]
            parts.append(part)
            offset, nbytes, at = offset + len(part), nbytes - len(part), at + 1
        return parts


class Scratch:
    """Memory for bytes that nobody wants."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, nbytes: int) -> list[memoryview]:
        if not nbytes:
            return []
        if not self._memory:
            self._memory = memoryview(bytearray(_SCRATCH_NBYTES))
        whole, rest = divmod(nbytes, len(self._memory))
        return [self._memory] * whole + [self._memory[:rest]] * bool(rest)
