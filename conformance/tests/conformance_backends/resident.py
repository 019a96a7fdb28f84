"""A correct memory tier that adopts and lends frames of the pool, and broken ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from conformance_backends.catalogue import breaks
from conformance_backends.memory import FULL, MISS, write_at
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold, Lease, MemoryPool
from lmcache_core.storage.contract import (
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    Outcome,
    Status,
)


class ResidentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ResidentBackend(Backend[ResidentConfig]):
    config_class = ResidentConfig
    pool: MemoryPool

    def __init__(self, config: ResidentConfig) -> None:
        self.holds: dict[StorageKey, Hold] = {}
        self.capacity_bytes: int | None = None
        self.lock = threading.RLock()  # guards the holds; the pool's own lock may be taken under it

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="memory", delete=True, max_in_flight=4)

    def open(self, host: Host) -> Capabilities | None:
        self.pool = host.pool
        self.capacity_bytes = host.capacity_bytes
        return None

    def close(self) -> None:
        with self.lock:
            for hold in self.holds.values():
                hold.drop()
            self.holds.clear()

    def adopt(self, key: StorageKey, hold: Hold) -> Outcome:
        with self.lock:
            old = self.holds.get(key)
            used = self.used_bytes() - (old.nbytes if old else 0) + hold.nbytes
            if self.capacity_bytes is not None and used > self.capacity_bytes:
                return self.refuse(hold)
            self.holds[key] = hold
            if old is not None:
                self.replaced(old)
        return Outcome(status=Status.OK, nbytes=hold.nbytes)

    def refuse(self, hold: Hold) -> Outcome:
        return FULL

    def replaced(self, hold: Hold) -> None:
        hold.drop()

    def borrow(self, key: StorageKey) -> Lease | None:
        with self.lock:
            hold = self.holds.get(key)
            return None if hold is None else hold.lease("resident")

    def discard(self, key: StorageKey, hold: Hold) -> bool:
        with self.lock:
            current = self.holds.get(key) is hold
            if current:
                del self.holds[key]
        hold.drop()
        return current

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            call.done(index, self.put_one(item))

    def put_one(self, item: Item) -> Outcome:
        lease = self.pool.try_allocate(item.nbytes, owner="resident")
        if lease is None:
            return FULL
        with lease:
            position = lease.address
            for view in item.views:
                write_at(position, bytes(view.host or b""))
                position += view.nbytes
            hold = lease.hold(tag=item.key)
        outcome = self.adopt(item.key, hold)
        if outcome.status is not Status.OK:
            hold.drop()
        return outcome

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            call.done(index, self.get_one(item))

    def get_one(self, item: Item) -> Outcome:
        from lmcache_core.errors import NotSupported

        if not item.whole:
            raise NotSupported("no ranges", op="get")
        lease = ResidentBackend.borrow(self, item.key)
        if lease is None:
            return MISS
        with lease:
            if lease.nbytes > item.nbytes:
                return Outcome(status=Status.TOO_SMALL, nbytes=lease.nbytes)
            value, position = bytes(lease.memory), 0
        for view in item.views:
            piece = value[position : position + view.nbytes]
            write_at(view.address, piece)
            position += len(piece)
        return Outcome(status=Status.OK, nbytes=len(value))

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            with self.lock:
                hold = self.holds.get(key)
                lease = None if hold is None else hold.lease("resident")
            if lease is None:
                call.done(index, MISS)
            else:
                lease.release()
                call.done(index, Outcome(status=Status.OK, nbytes=lease.nbytes))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.remaining()
            with self.lock:
                hold = self.holds.pop(key, None)
            if hold is None:
                call.done(index, MISS)
            else:
                hold.drop()
                call.done(index, Outcome(status=Status.OK))

    def used_bytes(self) -> int:
        return sum(hold.nbytes for hold in self.holds.values())

    def stats(self) -> BackendStats:
        with self.lock:
            return BackendStats(entries=len(self.holds), used_bytes=self.used_bytes())


# -- broken --------------------------------------------------------------------------------------


@breaks("borrowing_gives_the_adopted_memory_itself")
class CopiesWhatItLends(ResidentBackend):
    def borrow(self, key: StorageKey) -> Lease | None:
        lease = super().borrow(key)
        if lease is None:
            return None
        with lease:
            copy = self.pool.try_allocate(lease.nbytes, owner="resident")
            if copy is not None:
                copy.memory[:] = lease.memory
        return copy


@breaks(
    "adopting_again_replaces_the_value_and_drops_its_hold",
    also=(
        "adopting_borrowing_and_discarding_may_overlap",
        "leases_and_holds_return_to_zero",
        "discarding_removes_exactly_the_hold_that_is_meant",
        "calls_that_succeed_leave_nothing_behind",
    ),
)
class KeepsReplacedHolds(ResidentBackend):
    def __init__(self, config: ResidentConfig) -> None:
        super().__init__(config)
        self.old: list[Hold] = []

    def replaced(self, hold: Hold) -> None:
        self.old.append(hold)


@breaks(
    "borrowing_what_is_absent_is_a_miss",
    also=(
        "adopting_borrowing_and_discarding_may_overlap",
        "a_refused_adoption_leaves_the_hold_with_its_caller",
    ),
)
class RaisesWhenAbsent(ResidentBackend):
    def borrow(self, key: StorageKey) -> Lease | None:
        return self.holds[key].lease("resident")


@breaks(
    "discarding_removes_exactly_the_hold_that_is_meant",
    also=("adopting_borrowing_and_discarding_may_overlap",),
)
class DiscardsWhateverIsThere(ResidentBackend):
    def discard(self, key: StorageKey, hold: Hold) -> bool:
        current = self.holds.pop(key, None)
        hold.drop()
        if current is not None:
            current.drop()
        return current is not None


@breaks("a_refused_adoption_leaves_the_hold_with_its_caller")
class DropsWhatItRefuses(ResidentBackend):
    def refuse(self, hold: Hold) -> Outcome:
        hold.drop()
        return FULL
