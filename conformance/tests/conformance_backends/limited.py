"""Correct backends with limits that most stores lack: the suite must stay within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance_backends.memory import MemoryBackend, MemoryConfig, failed
from lmcache_core.storage.contract import Call, Capabilities, Item, Outcome


class SmallValues(MemoryBackend):
    """Takes frames of three pages at most."""

    most = 3 * 4096

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(MemoryConfig(max_value_bytes=self.most))


class SinglePages(SmallValues):
    """Takes values of a page, which is less than any frame."""

    most = 4096


class CoarseRanges(MemoryBackend):
    """Serves ranges, and none below its declared minimum."""

    least = 64 << 10

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, range_min=self.least)

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        self.each(items, call, self.get_long_enough)

    def get_long_enough(self, item: Item) -> Outcome:
        if not item.whole and item.nbytes < self.least:
            return failed("a range below the minimum")
        return self.get_one(item)


class CoarseRangesOfSmallValues(CoarseRanges):
    """No value is as long as its shortest range."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(MemoryConfig(max_value_bytes=self.least // 2))
