"""Broken in how they treat memory and each other's calls: ownership, concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance_backends.catalogue import RACES, THROUGH_THE_CORE, breaks
from conformance_backends.memory import FULL, MemoryBackend, failed, write_at
from conformance_backends.schedule import Rendezvous
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Lease
from lmcache_core.storage.contract import (
    Call,
    Capabilities,
    Host,
    Item,
    Outcome,
    Status,
    View,
)

PAGE = 4096
# -- ownership -----------------------------------------------------------------------------------


@breaks("a_put_keeps_no_view")
class KeepsTheItemsOfAPut(MemoryBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        super().put_many(items, call)
        self.kept = items


@breaks("a_get_keeps_no_view")
class KeepsTheItemsOfAGet(MemoryBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        super().get_many(items, call)
        self.kept = items


@breaks("a_get_keeps_no_view")
class KeepsItsLastError(MemoryBackend):
    """An exception's traceback refers to the frames it passed, and they to the views."""

    def absent(self, item: Item) -> Outcome:
        try:
            raise LookupError(item.key)
        except LookupError as error:
            self.last_error = error
        return super().absent(item)


@breaks("the_source_of_a_put_is_never_modified")
class EncryptsInPlace(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        value = super().gather(views)
        write_at(views[-1].address, bytes(16))
        return value


@breaks(
    "changing_the_source_after_a_put_changes_nothing",
    also=(
        "memory_is_let_go_of_when_its_item_is_settled",
        "a_put_keeps_no_view",
        "a_batch_cancelled_under_way_settles_each_item_once_and_truly",
        *THROUGH_THE_CORE,
    ),
)
class RefersToTheSource(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        if len(views) == 1 and views[0].host is not None:
            return views[0].host  # type: ignore[return-value]  # the fault: a view instead of a copy
        return super().gather(views)


@breaks(
    "nothing_is_written_after_a_get_is_settled",
    also=(
        "memory_is_let_go_of_when_its_item_is_settled",
        "a_get_keeps_no_view",
        "a_batch_cancelled_under_way_settles_each_item_once_and_truly",
        *THROUGH_THE_CORE,
        *RACES,
    ),
)
class LandsLate(MemoryBackend):
    """Each get also writes into the memory of the one before."""

    before: tuple[bytes, tuple[View, ...]] | None = None

    def spread(self, part: bytes, views: Sequence[View]) -> None:
        super().spread(part, views)
        with self.lock:
            before, self.before = self.before, (part, tuple(views))
        if before is not None:
            super().spread(*before)


@breaks(
    "a_stored_value_does_not_change_with_the_memory_it_was_read_into",
    also=("a_get_keeps_no_view", "nothing_is_written_after_a_get_is_settled"),
)
class CachesTheMemoryOfTheReader(MemoryBackend):
    def get_one(self, item: Item) -> Outcome:
        outcome = super().get_one(item)
        host = item.views[0].host
        if outcome.status is Status.OK and host is not None and outcome.nbytes == item.views[0].nbytes:
            with self.lock:
                if self.values.get(item.key) == bytes(host):
                    self.values[item.key] = host  # type: ignore[assignment]  # the fault
        return outcome


@breaks(
    "leases_and_holds_return_to_zero",
    also=(
        "calls_that_end_badly_leave_nothing_behind",
        "all_memory_is_back_after_a_workload_through_the_core",
        "a_full_medium_is_full_and_loses_nothing",
    ),
)
class LeaksALeaseForEachMiss(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        self.pool, self.leases = host.pool, list[Lease | None]()
        return super().open(host)

    def absent(self, item: Item) -> Outcome:
        self.leases.append(self.pool.try_allocate(PAGE, owner="leaky"))
        return super().absent(item)


# -- concurrency ---------------------------------------------------------------------------------


@breaks("writers_of_different_keys_do_not_disturb_each_other", also=RACES)
class SharesABounceBuffer(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bounce = b""
        self.rendezvous = Rendezvous(patience_s=0.1)

    def gather(self, views: Sequence[View]) -> bytes:
        self.bounce = super().gather(views)
        self.rendezvous.passed("gather")
        self.rendezvous.wait_for("gather")
        return self.bounce


@breaks("an_overwrite_is_seen_whole_by_readers", also=(*RACES, "nothing_survives_close"))
class OverwritesInPlace(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rendezvous = Rendezvous()

    def put_one(self, item: Item) -> Outcome:
        old = self.values.get(item.key)
        if (
            old is not None
            and item.nbytes <= self.config.max_value_bytes
            and self.has_room(item.key, item.nbytes)
        ):
            new = self.gather(item.views)
            with self.lock:
                self.values[item.key] = new[:PAGE] + old[PAGE:]
            self.rendezvous.wait_for("read", passes=4)
        return super().put_one(item)

    def read(self, key: StorageKey) -> bytes | None:
        value = super().read(key)
        self.rendezvous.passed("read")
        return value


@breaks("a_call_held_up_at_any_line_does_not_spoil_another", also=RACES)
class ReplacesInTwoSteps(MemoryBackend):
    """A window of one line, and nobody who waits in it: found by preemption alone."""

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        if not self.has_room(key, len(value)):
            return FULL
        self.values.pop(key, None)
        self.values[key] = value
        return Outcome(status=Status.OK, nbytes=len(value))

    def read(self, key: StorageKey) -> bytes | None:
        return self.values.get(key)


@breaks("a_call_held_up_at_any_line_does_not_spoil_another", also=RACES)
class FillsItsReadCacheLate(MemoryBackend):
    """A get caches what it read although a put came between: later gets see the old value again."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.cache: dict[str, bytes] = {}

    def read(self, key: StorageKey) -> bytes | None:
        cached = self.cache.get(key)
        if cached is not None:
            return cached
        value = super().read(key)
        if value is not None:
            self.cache[key] = value
        return value

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        outcome = super().keep(key, value)
        self.cache.pop(key, None)
        return outcome

    def delete_one(self, key: StorageKey) -> Outcome:
        outcome = super().delete_one(key)
        self.cache.pop(key, None)
        return outcome


@breaks("racing_calls_on_one_key_have_an_order_that_explains_them", also=RACES)
class LosesAPutWhileItReads(MemoryBackend):
    reading = 0

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        with self.lock:
            self.reading += 1
        super().get_many(items, call)
        with self.lock:
            self.reading -= 1

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        if self.reading:
            return Outcome(status=Status.OK, nbytes=len(value))
        return super().keep(key, value)


@breaks("as_many_calls_as_declared_run_at_once")
class RefusesTheFifthCall(MemoryBackend):
    """Declares six."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inside = 0

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        with self.lock:
            self.inside += 1
            busy = self.inside > 4
        try:
            if busy:
                self.each(items, call, lambda item: failed("busy"))
            else:
                super().put_many(items, call)
        finally:
            with self.lock:
                self.inside -= 1
