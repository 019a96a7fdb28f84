"""Broken in what a few values and calls don't show: many of them, over and over, or many in one batch."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from conformance_backends.catalogue import breaks
from conformance_backends.files import FileBackend
from conformance_backends.memory import MISS, MemoryBackend, failed
from conformance_backends.network import NetworkBackend
from conformance_backends.retaining_files import PinningFiles
from lmcache_core.errors import BackendError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import (
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    Outcome,
    Page,
    Status,
)

T = TypeVar("T")
MANY = "a_store_of_many_values_holds_counts_and_lists_all_of_them"
GROWTH = "calls_that_succeed_leave_nothing_behind"
COUNTING = "what_is_charged_and_counted_follows_what_is_stored"
FULL_BY_CHARGE = "what_is_charged_explains_that_the_store_is_full"
# -- many values ---------------------------------------------------------------------------------


@breaks(MANY)
class DropsTheOldestOf1000(MemoryBackend):
    """Without saying that it evicts."""

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        outcome = super().keep(key, value)
        while len(self.values) > 1000:
            del self.values[next(iter(self.values))]
        return outcome


@breaks(MANY)
class ListsTheFirst500(MemoryBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.lock:
            first = sorted(self.values)[:500]
        page = super().scan(call, prefix, cursor, limit)
        entries = [entry for entry in page.entries if entry.key in first]
        ends = len(entries) < len(page.entries)
        return Page(entries=entries, cursor=None if ends else page.cursor)


@breaks(MANY)
class CountsTo1000(MemoryBackend):
    def stats(self) -> BackendStats:
        known = super().stats()
        return replace(known, entries=min(known.entries, 1000))


@breaks("a_batch_may_be_of_any_size_unless_a_maximum_is_declared")
class LosesItemsPastThe512thOfABatch(FileBackend):
    """As many requests as its ring has entries; the rest is acknowledged, too."""

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        super().put_many(items[:512], call)
        for index, item in enumerate(items[512:], 512):
            call.done(index, Outcome(status=Status.OK, nbytes=item.nbytes))


@breaks("a_batch_may_be_of_any_size_unless_a_maximum_is_declared")
class StatsTheFirst512OfABatch(FileBackend):
    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        super().stat_many(keys[:512], call)
        for index in range(512, len(keys)):
            call.done(index, MISS)


# -- many calls ----------------------------------------------------------------------------------


@breaks(GROWTH)
class KeepsAKilobyteOfEachHit(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.log: list[bytearray] = []

    def get_one(self, item: Item) -> Outcome:
        outcome = super().get_one(item)
        if outcome.status is Status.OK:
            self.log.append(bytearray(1024))
        return outcome


@breaks(GROWTH)
class KeepsReplacedValues(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.replaced: list[bytes] = []

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        old, outcome = self.values.get(key), super().keep(key, value)
        if outcome.status is Status.OK and old is not None:
            self.replaced.append(old)
        return outcome


@breaks(GROWTH, also=("calls_that_end_badly_leave_nothing_behind",))
class StartsAThreadEvery50Gets(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_gets = 0
        self.end = threading.Event()

    def get_one(self, item: Item) -> Outcome:
        self.num_gets += 1
        if self.num_gets % 50 == 0:
            threading.Thread(target=self.end.wait, daemon=True).start()
        return super().get_one(item)

    def close(self) -> None:
        self.end.set()
        super().close()


@breaks("calls_that_end_badly_take_nothing_from_later_ones")
class LosesAPermitWhenTooSmall(MemoryBackend):
    """The early return keeps its permit; without one, every call waits in vain."""

    permits = 100

    def get_one(self, item: Item) -> Outcome:
        if not self.permits:
            return failed("no permit within the deadline")
        outcome = super().get_one(item)
        self.permits -= outcome.status is Status.TOO_SMALL
        return outcome


@breaks("calls_that_end_badly_take_nothing_from_later_ones")
class LosesAPermitWhenExpired(MemoryBackend):
    permits = 100

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        if not self.permits:
            for index in range(len(things)):
                call.done(index, failed("no permit within the deadline"))
            return
        self.permits -= 1
        super().each(things, call, one)
        self.permits += 1


@breaks("calls_that_end_badly_take_nothing_from_later_ones")
class LosesAPermitWhenGivenUp(MemoryBackend):
    permits = 100

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        if not self.permits:
            raise BackendError("no permit within the deadline")
        self.permits -= 1
        try:
            super().each(things, call, one)
        finally:
            self.permits += not call.cancelled


# -- what stays open -----------------------------------------------------------------------------


@breaks("writes_that_the_medium_refuses_leave_nothing_open")
class LeavesADescriptorWhenFull(FileBackend):
    def write(self, path: Path, value: bytes) -> None:
        self.medium.change()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self.medium.write(descriptor, memoryview(value))
        os.close(descriptor)


@breaks("connections_that_break_leave_nothing_open")
class KeepsBrokenConnections(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.broken: list[socket.socket] = []

    def give_back(self, sock: socket.socket, *, whole: bool) -> None:
        if not whole and not self.closed:
            self.broken.append(sock.dup())
        super().give_back(sock, whole=whole)

    def close(self) -> None:
        super().close()
        while self.broken:
            self.broken.pop().close()


@breaks("nothing_survives_close", also=("a_call_that_comes_after_close_does_no_harm",))
class KeepsADescriptorForEachThread(FileBackend):
    """`close` closes that of the thread which calls it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.local = threading.local()

    def read(self, key: StorageKey) -> bytes | None:
        if not hasattr(self.local, "descriptor"):
            self.local.descriptor = os.open(self.path, os.O_RDONLY)
        return super().read(key)

    def close(self) -> None:
        super().close()
        if hasattr(self.local, "descriptor"):
            os.close(self.local.descriptor)
            del self.local.descriptor


@breaks("calls_that_succeed_leave_nothing_behind")
class RemembersEachList(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.listed: list[Page] = []

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        page = super().scan(call, prefix, cursor, limit)
        self.listed.append(page)
        return page


@breaks(GROWTH)
class KeepsANoteOfEachPin(PinningFiles):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.notes: list[bytearray] = []

    def pin_one(self, key: StorageKey, ttl_s: float) -> Outcome:
        self.notes.append(bytearray(64))
        return super().pin_one(key, ttl_s)


@breaks("stores_that_were_closed_leave_no_memory_behind")
class KeepsABufferOfEachOpening(MemoryBackend):
    buffers: ClassVar[list[bytes]] = []

    def open(self, host: Host) -> Capabilities | None:
        self.buffers.append(os.urandom(2 * 4096))
        return super().open(host)


# -- what is charged and counted -----------------------------------------------------------------


@breaks(COUNTING, also=(FULL_BY_CHARGE,))
class ChargesAHundredfold(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        outcome = super().keep(key, value)
        return replace(outcome, stored=100 * len(value)) if outcome.status is Status.OK else outcome


@breaks(FULL_BY_CHARGE)
class ChargesTwice(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        outcome = super().keep(key, value)
        return replace(outcome, stored=2 * len(value)) if outcome.status is Status.OK else outcome


@breaks(COUNTING)
class NeverCountsDown(MemoryBackend):
    most = 0

    def stats(self) -> BackendStats:
        known = super().stats()
        self.most = max(self.most, known.used_bytes)
        return replace(known, used_bytes=self.most)


@breaks(COUNTING)
class SaysThatItsCapacityIsUsed(FileBackend):
    def stats(self) -> BackendStats:
        known = super().stats()
        return replace(known, used_bytes=self.capacity_bytes or known.used_bytes)


@breaks("a_batch_may_be_of_any_size_unless_a_maximum_is_declared", also=(MANY,))
class LosesItemsPastThe100thOfABatch(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_batch=None)

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        super().each(things[:100], call, one)
        for index, thing in enumerate(things[100:], 100):
            put = isinstance(thing, Item) and thing.key not in self.values
            call.done(index, Outcome(status=Status.OK, nbytes=thing.nbytes) if put else MISS)  # type: ignore[attr-defined]
