"""Broken where calls overlap: batches, scans beside writers, items settled before they are through."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from conformance_backends.catalogue import DAMAGE, RACES, THROUGH_THE_CORE, breaks
from conformance_backends.memory import FULL, MISS, MemoryBackend
from conformance_backends.resident import ResidentBackend
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold
from lmcache_core.storage.contract import BackendStats, Call, Entry, Item, Outcome, Page, Status

T = TypeVar("T")


@breaks(
    "batches_that_overlap_neither_mix_nor_wait_for_each_other",
    also=(*RACES, "an_item_that_is_settled_is_there"),
)
class SharesItsBatchIndex(MemoryBackend):
    """The position in the batch is the instance's: overlapping batches settle each other's items."""

    position = 0

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        self.position = 0
        for _ in things:
            call.remaining()
            outcome = one(things[min(self.position, len(things) - 1)])
            call.done(min(self.position, len(things) - 1), outcome)
            self.position += 1


@breaks("batches_that_overlap_neither_mix_nor_wait_for_each_other")
class LocksABatchInItsOrder(MemoryBackend):
    """A lock a key, taken in the order given: two batches that name them in opposite order hang."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.locks: dict[str, threading.Lock] = {}

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        taken: list[threading.Lock] = []
        try:
            for key in dict.fromkeys(item.key for item in items):
                lock = self.locks.setdefault(key, threading.Lock())
                lock.acquire()
                taken.append(lock)
            super().put_many(items, call)
        finally:
            for lock in taken:
                lock.release()


@breaks("scans_and_stats_beside_a_writer_tell_what_is_there")
class ScansWithoutItsLock(MemoryBackend):
    """Walks through the dictionary while others change it."""

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        keys = []
        for key in self.values:
            if key.startswith(prefix):
                keys.append(key)
        keys.sort()
        start = 0 if cursor is None else bisect_right(keys, cursor)
        chosen = keys[start : start + limit]
        entries = [Entry(key=StorageKey(key), nbytes=len(self.values[key])) for key in chosen]
        return Page(entries=entries, cursor=chosen[-1] if start + limit < len(keys) else None)


@breaks("scans_and_stats_beside_a_writer_tell_what_is_there")
class CountsWithoutItsLock(MemoryBackend):
    def stats(self) -> BackendStats:
        used = 0
        for value in self.values.values():
            used += len(value)
        return BackendStats(entries=len(self.values), used_bytes=used)


@breaks("a_value_that_grows_during_a_get_stays_inside_the_views", also=RACES)
class ReadsAgainAfterItChecked(MemoryBackend):
    """Checks one length and reads another."""

    def get_one(self, item: Item) -> Outcome:
        checked = self.read(item.key)
        if checked is not None and item.whole and len(checked) > item.nbytes:
            return self.too_small(item, checked)
        value = self.read(item.key)
        if value is None:
            return self.absent(item)
        part = value if item.whole else self.cut(value, item)
        if not item.whole and len(part) < item.nbytes:
            return MISS
        self.spread(part, item.views)
        return Outcome(status=Status.OK, nbytes=len(part))


@breaks("a_call_held_up_at_any_line_does_not_spoil_another", also=RACES)
class AnnouncesBeforeItStores(MemoryBackend):
    """Its index knows the value first: between two lines, stat says OK and get misses."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.index: dict[str, int] = {}

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        if not self.has_room(key, len(value)):
            return FULL
        self.index[key] = len(value)
        self.values[key] = value
        return Outcome(status=Status.OK, nbytes=len(value))

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.lock:
            value = self.values.pop(key, None)
            self.index.pop(key, None)
        return MISS if value is None else Outcome(status=Status.OK)

    def read(self, key: StorageKey) -> bytes | None:
        return self.values.get(key)

    def stat_one(self, key: StorageKey) -> Outcome:
        nbytes = self.index.get(key)
        return MISS if nbytes is None else Outcome(status=Status.OK, nbytes=nbytes)


class _SettlesEarly(MemoryBackend):
    def settle(self, index: int, item: Item, call: Call) -> bool:
        """Settles a put as OK that will be; False when it must be refused."""
        call.remaining()
        fits = item.nbytes <= self.config.max_value_bytes and self.has_room(item.key, item.nbytes)
        call.done(index, Outcome(status=Status.OK, nbytes=item.nbytes) if fits else FULL)
        return fits


@breaks("memory_is_let_go_of_when_its_item_is_settled", also=("an_item_that_is_settled_is_there",))
class SettlesBeforeItReads(_SettlesEarly):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            if self.settle(index, item, call):
                self.put_one(item)


@breaks("an_item_that_is_settled_is_there")
class SettlesBeforeItStores(_SettlesEarly):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            value = self.gather(item.views)
            if self.settle(index, item, call):
                with self.lock:
                    self.keep(item.key, value)


@breaks("memory_is_let_go_of_when_its_item_is_settled", also=(*DAMAGE, *THROUGH_THE_CORE))
class SettlesBeforeItFills(MemoryBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            value = self.read(item.key)
            if value is None or not item.whole or len(value) > item.nbytes:
                call.done(index, self.get_one(item))
            else:
                call.done(index, Outcome(status=Status.OK, nbytes=len(value)))
                self.spread(value, item.views)


@breaks("adopting_borrowing_and_discarding_may_overlap", also=RACES)
class ReplacesHoldsInTwoSteps(ResidentBackend):
    """Two adoptions that cross both replace the same hold, and one of them is lost."""

    def adopt(self, key: StorageKey, hold: Hold) -> Outcome:
        with self.lock:
            old = self.holds.get(key)
            used = self.used_bytes() - (old.nbytes if old else 0) + hold.nbytes
        if self.capacity_bytes is not None and used > self.capacity_bytes:
            return self.refuse(hold)
        with self.lock:
            self.holds[key] = hold
        if old is not None:
            old.drop()
        return Outcome(status=Status.OK, nbytes=hold.nbytes)


@breaks("a_batch_is_left_as_it_was_given")
class EmptiesItsBatch(MemoryBackend):
    """Takes item by item off the end of the caller's own list."""

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        call.remaining()
        while isinstance(items, list) and items:
            item = items.pop()
            call.done(len(items), self.put_one(item))
