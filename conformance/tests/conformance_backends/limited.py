"""Correct backends with limits that most stores lack: the suite must stay within them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from conformance_backends.files import FileBackend
from conformance_backends.memory import MemoryBackend, MemoryConfig, failed
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Capabilities, Item, Outcome, Page, Status

T = TypeVar("T")


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


class TakesItsTime(MemoryBackend):
    """Right, and slow: as a store at the other end of the country."""

    call_s = 0.05

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.closed = threading.Event()

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        self.closed.wait(min(self.call_s, call.remaining()))
        super().each(things, call, one)

    def close(self) -> None:
        self.closed.set()
        super().close()


class TakesRoomInLargeSteps(MemoryBackend):
    """Occupies whole blocks of 128 KiB, and says so."""

    block = 128 << 10

    def blocks(self, nbytes: int) -> int:
        return -(-nbytes // self.block) * self.block

    def used_bytes(self) -> int:
        return sum(self.blocks(len(value)) for value in self.values.values())

    def has_room(self, key: StorageKey, nbytes: int) -> bool:
        old = self.values.get(self.name(key))
        freed = 0 if old is None else self.blocks(len(old))
        return self.capacity_bytes is None or self.used_bytes() - freed + self.blocks(nbytes) <= (
            self.capacity_bytes
        )

    def put_one(self, item: Item) -> Outcome:
        outcome = super().put_one(item)
        return replace(outcome, stored=self.blocks(item.nbytes)) if outcome.status is Status.OK else outcome


class ListsInFitsAndStarts(FileBackend):
    """Right, and odd: as servers scan, with empty pages in between, and some values more than once."""

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        if cursor is None or cursor.startswith("after "):
            return Page(entries=(), cursor=f"from {(cursor or '').removeprefix('after ')}")
        page = super().scan(call, prefix, cursor.removeprefix("from ") or None, limit)
        twice = [*page.entries, *page.entries][:limit]
        return Page(entries=twice, cursor=page.cursor and f"after {page.cursor}")
