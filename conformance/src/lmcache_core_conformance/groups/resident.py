"""Resident: a memory tier keeps frames where they lie, without moving a byte."""

from __future__ import annotations

import itertools
from typing import cast

from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold
from lmcache_core.storage.contract import Resident, Status
from lmcache_core_conformance.bench import spread
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.preemption import interrupt
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.values import PAGE, difference, key_named, value_of
from lmcache_core_conformance.verdicts import check


class Residents(Group):
    group = "resident"

    @needs("Resident")
    def test_borrowing_gives_the_adopted_memory_itself(self) -> None:
        """The nearest tier is as fast as memory only if nothing is copied on the way in or out."""
        store, key = self.bench.open(), key_named("adopted")
        value = value_of(key, 1, self.bench.fit(3))
        hold, address = self._hold(store, key, value)
        outcome = self._resident(store).adopt(key, hold)
        check(outcome.status is Status.OK, f"adopt: {outcome.status.name} ({outcome.error})")
        for reading in ("first", "second"):
            lease = self._resident(store).borrow(key)
            check(lease is not None, f"the {reading} borrow of an adopted value is a miss")
            if lease is not None:
                with lease:
                    check(lease.address == address, "borrow gave other memory than was adopted")
                    seen = bytes(lease.memory)
                check(seen == value, f"the {reading} borrow: {difference(value, seen)}")
        self.holds(store, key, value, "an adopted value, by get")
        check(store.stat(key).nbytes == len(value), "stat of an adopted value has another length")

    @needs("Resident")
    def test_adopting_again_replaces_the_value_and_drops_its_hold(self) -> None:
        """An old hold that is kept is a frame of memory lost with each overwrite."""
        store, key = self.bench.open(), key_named("replaced")
        for version in range(3):
            value = value_of(key, version, self.bench.fit(2))
            self._resident(store).adopt(key, self._hold(store, key, value)[0])
            self.holds(store, key, value, f"version {version}")
        holds = store.host.pool.stats().holds
        check(holds == 1, f"one value was adopted three times, {holds} holds are left")

    @needs("Resident")
    def test_borrowing_what_is_absent_is_a_miss(self) -> None:
        """Between lookup and borrow a value may go: that is a miss, never an exception or other memory."""
        store, key = self.bench.open(), key_named("absent")
        resident = self._resident(store)
        check(resident.borrow(key) is None, "borrow of a key that was never stored gave a lease")
        hold, _ = self._hold(store, key, value_of(key, 1, PAGE))
        resident.adopt(key, hold)
        hold.drop()  # as the pool does when it needs the room
        check(resident.borrow(key) is None, "borrow of an evicted value gave a lease")
        self.lacks(store, key, PAGE, "a value that the pool evicted")

    @needs("Resident")
    def test_discarding_removes_exactly_the_hold_that_is_meant(self) -> None:
        """An eviction that comes late must not throw away the value that replaced its victim."""
        store, key = self.bench.open(), key_named("discarded")
        resident, new = self._resident(store), value_of(key, 2, PAGE)
        old_hold, _ = self._hold(store, key, value_of(key, 1, PAGE))
        new_hold, _ = self._hold(store, key, new)
        resident.adopt(key, old_hold)
        resident.adopt(key, new_hold)
        check(not resident.discard(key, old_hold), "discarding a replaced hold says it was the value")
        self.holds(store, key, new, "the value, after its predecessor's hold was discarded")
        check(resident.discard(key, new_hold), "discarding the value's hold says it was not")
        self.lacks(store, key, PAGE, "a discarded value")
        check(store.host.pool.stats().holds == 0, "a discarded value's hold is still there")

    @needs("Resident")
    def test_adopting_borrowing_and_discarding_may_overlap(self) -> None:
        """The hottest path of all: two adoptions that cross lose a hold, and with it a frame, for ever."""
        store, number = self.bench.open(), 0
        for first, second in itertools.product(
            ("adopt", "discard", "borrow"), ("adopt", "discard", "borrow")
        ):
            total = self._overlap(store, "uncut", first, 0, second)
            for line in spread(total, self.bench.harness.interruptions):
                number += 1
                self._overlap(store, f"{number}", first, line, second)

    @needs("Resident")
    def test_a_refused_adoption_leaves_the_hold_with_its_caller(self) -> None:
        """FULL means "not taken": a hold that is dropped all the same loses the frame it stood for."""
        bound = self.bench.harness.small_capacity_bytes
        store = self.bench.open(capacity_bytes=bound)
        nbytes = self.bench.fit(16)
        for number in range(bound // nbytes + 2):
            key = key_named(f"adopted-{number}")
            hold, _ = self._hold(store, key, value_of(key, 1, nbytes))
            if self._resident(store).adopt(key, hold).status is not Status.OK:
                check(self._resident(store).borrow(key) is None, "a refused value can be borrowed")
                lease = hold.lease("conformance")
                check(lease is not None, "a refused adoption ended the caller's hold")
                if lease is not None:
                    lease.release()
                hold.drop()
                return
        check(False, f"more than {bound} bytes were adopted under a bound of that")

    def _overlap(self, store: Store, name: str, first: str, line: int, second: str) -> int:
        """One call, another in the middle of it, and then all is as after one of the two orders."""
        resident, key, pool = self._resident(store), key_named(f"overlap {name}"), store.host.pool
        values = [value_of(key, version, PAGE) for version in range(3)]
        holds = [self._hold(store, key, value)[0] for value in values]
        resident.adopt(key, holds[0])

        def call(operation: str, new: Hold) -> None:
            if operation == "adopt":
                check(resident.adopt(key, new).status is Status.OK, "an adoption was refused")
            elif operation == "discard":
                resident.discard(key, holds[0])
                new.drop()
            else:
                new.drop()
                lease = resident.borrow(key)
                if lease is not None:
                    with lease:
                        check(bytes(lease.memory) in values, "borrow gave memory that is no version's")

        when = f"{second} while {first} was at its line {line}"
        total = interrupt(lambda: call(first, holds[1]), line, lambda: call(second, holds[2]))
        got = store.get(key, PAGE)
        adopted = "adopt" in (first, second)
        check(
            got.status is Status.OK or (not adopted and got.status is Status.MISS),
            f"{when}: {got.status.name}",
        )
        due = 1 if got.status is Status.OK else 0
        check(pool.stats().holds == due, f"{when}: {pool.stats().holds} holds of {due} value")
        check(pool.stats().leases == 0, f"{when}: {pool.stats().leases} leases are left")
        for hold in holds:
            resident.discard(key, hold)
        check(pool.stats().holds == 0, f"{when}: {pool.stats().holds} holds after all were discarded")
        return total

    def _resident(self, store: Store) -> Resident:
        return cast(Resident, store.backend)

    def _hold(self, store: Store, key: StorageKey, value: bytes) -> tuple[Hold, int]:
        """A hold on a frame of the pool that holds `value`, and its address."""
        with store.host.pool.allocate(len(value), owner="conformance", deadline=0.0) as lease:
            lease.memory[:] = value
            return lease.hold(tag=key), lease.address
