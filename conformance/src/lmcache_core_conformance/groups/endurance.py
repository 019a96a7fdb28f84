"""Endurance: what a handful of values and calls doesn't show, many of them do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Item, Status
from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.driver import Buffer, RecordingCall, Store, Want
from lmcache_core_conformance.growth import check_no_growth, check_no_growth_of_lives, handles, more_handles
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.timing import deadline_of
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, check

T = TypeVar("T")
_MANY_VALUES = 2500
_LARGE_BATCH = 1100
_MOST_AT_ONCE = 250
_BAD_CALLS = 300
_PIN_TTL_S = 0.05
_REFUSED_WRITES = 32
_BROKEN_CALLS = 64


class Endurance(Group):
    group = "endurance"

    def test_a_store_of_many_values_holds_counts_and_lists_all_of_them(self) -> None:
        """A limit nobody declared drops or hides values in silence: a busy day stores millions."""
        store, keys = self.bench.open(), []
        until = time.monotonic() + self.bench.harness.limit_s / 4  # a slow store is given fewer
        for some in self._in_batches(store, self._names(_MANY_VALUES)):
            outcomes = store.put_many([(key, value_of(key, 1, PAGE)) for key in some])
            keys += [key for key, one in zip(some, outcomes, strict=True) if one.status is Status.OK]
            refused = {one.status for one in outcomes} - {Status.OK, Status.FULL}
            check(not refused, f"put of {len(some)} values beside {len(keys)} ended {refused}")
            if len({one.status for one in outcomes}) > 1 or time.monotonic() > until:
                break
        for some in self._in_batches(store, keys):
            stats = store.stat_many(some)
            known = sum(one.status is Status.OK and one.nbytes == PAGE for one in stats)
            check(known == len(some), f"of {len(keys)} values stored, stat lacks {len(some) - known}")
            for key, got in zip(some, store.get_many([Want(key, (PAGE,)) for key in some]), strict=True):
                self.check_value(got, value_of(key, 1, PAGE), f"one of {len(keys)} values")
        counted = store.stats().entries
        check(
            counted == len(keys) or (self.bench.capabilities.shared and not counted),
            f"{len(keys)} values are stored, and stats counts {counted}",
        )
        if self.bench.capabilities.scan:
            lacking = len(set(keys) - {entry.key for entry in store.scan(limit=1000)})
            check(not lacking, f"of {len(keys)} values stored, a scan lacks {lacking}")

    def test_a_batch_may_be_of_any_size_unless_a_maximum_is_declared(self) -> None:
        """A limit of the driver that isn't declared fails, or loses, the end of each long prefix."""
        declared = self.bench.capabilities.max_batch
        if declared is not None:
            raise NotApplicable(f"capability max_batch is {declared}")
        store, keys = self.bench.open(), self._names(_LARGE_BATCH)
        values = [(key, value_of(key, 1, PAGE)) for key in keys]
        puts = [outcome.status for outcome in store.put_many(values)]
        self._all_are(puts, Status.OK, "put")
        self._all_are([outcome.status for outcome in store.stat_many(keys)], Status.OK, "stat")
        for place, got in enumerate(store.get_many([Want(key, (PAGE,)) for key in keys])):
            self.check_value(got, values[place][1], f"item {place} of {len(keys)}")
        if self.bench.capabilities.delete:
            self._all_are([outcome.status for outcome in store.delete_many(keys)], Status.OK, "delete")
            self._all_are([outcome.status for outcome in store.stat_many(keys)], Status.MISS, "later stat")

    def test_calls_that_succeed_leave_nothing_behind(self) -> None:
        """What each hit, or each value that is replaced, keeps for itself ends the engine after a week."""
        store = self.bench.open(capacity_bytes=self.bench.harness.small_capacity_bytes)
        key, beside = key_named("again and again"), key_named("beside it")
        nbytes = self.bench.fit(max(min(self.bench.harness.small_capacity_bytes // PAGE // 16, 16), 1))
        versions = [value_of(key, version, nbytes) for version in (1, 2)]
        other = value_of(beside, 1, nbytes)
        self.put(store, beside, other)
        source, target = Buffer([nbytes]), Buffer([nbytes])
        put, get = [Item(key, source.views())], [Item(key, target.views())]

        def once() -> None:
            for version in versions:
                source.write(version)
                ended = [
                    store.call(1, lambda call: store.backend.put_many(put, call)),
                    store.call(1, lambda call: store.backend.get_many(get, call)),
                    store.stat_many([key]),
                ]
                good = all(outcomes[0].status is Status.OK for outcomes in ended)
                check(good, f"one of put, get and stat ended {[one[0].status.name for one in ended]}")
            if self.bench.capabilities.scan:
                store.scan()
            if self.bench.capabilities.pin:
                store.call(1, lambda call: store.backend.pin_many([beside], _PIN_TTL_S, call))
            if self.bench.capabilities.delete:
                store.delete(key)
            store.calls.clear()
            store.host.lost_copies.clear()

        check_no_growth(once, "calls that succeed", nbytes=2 * nbytes)
        self.holds(store, beside, other, "a value beside the one used")

    def test_stores_that_were_closed_leave_no_memory_behind(self) -> None:
        """A tier that fails is opened again and again: a buffer kept by each opening ends the engine."""
        place, (key, value) = self.bench.place(), self.some_values(1)[0]
        harness, first = self.bench.harness, self.bench.build(place)
        host = self.bench.host(first, capacity_bytes=harness.small_capacity_bytes)
        first.close()

        def life() -> None:
            backend = harness.build(place.options)  # not by the bench, which keeps what it has built
            try:
                offers = backend.open(host) or backend.capabilities
                store = Store(backend, host, offers, place.options)
                self.put(store, key, value)
                self.holds(store, key, value)
            finally:
                backend.close()

        try:
            check_no_growth_of_lives(life, "opening and closing a store")
        finally:
            host.close()

    def test_calls_that_end_badly_take_nothing_from_later_ones(self) -> None:
        """A permit, slot or connection that a miss doesn't give back is missing: in the end, all of them."""
        harness, offered = self.bench.harness, self.bench.capabilities
        store, absent = self.bench.open(capacity_bytes=harness.small_capacity_bytes), key_named("absent")
        key, value = self.some_values(1, pages=3)[0]
        self.put(store, key, value)
        past = Want(key, (2 * max(offered.range_min, PAGE),), offset=len(value))
        huge = Buffer([harness.small_capacity_bytes + PAGE])
        too_large = Item(key_named("too large"), huge.views())
        calls: dict[str, Callable[[], object]] = {
            "a get that misses": lambda: store.get(absent, PAGE),
            "a get into too little memory": lambda: store.get(key, PAGE),
            "a range past the end": lambda: store.get_many([past]),
            "a stat that misses": lambda: store.stat(absent),
        }
        expired = {
            "an expired get": lambda: store.get(key, len(value)),
            "an expired put": lambda: store.put(absent, value),
            "an expired stat": lambda: store.stat(key),
        }
        if offered.delete:
            calls["a delete that misses"] = lambda: store.delete(absent)
            expired["an expired delete"] = lambda: store.delete(absent)
        if not offered.self_evicting:
            calls["a put that is too large"] = lambda: store.call(
                1, lambda call: store.backend.put_many([too_large], call)
            )
        for what, call in calls.items():
            self._many_times(store, call)
            self._still_serves(store, key, value, what)
        for what, call in expired.items():
            with deadline_of(store, -1.0):
                self._many_times(store, call)
            self._still_serves(store, key, value, what)
        pair = [(key_named(f"given up {n}"), value) for n in range(min(2, offered.max_batch or 2))]
        given_up: dict[str, Callable[[], object]] = {
            "a get that is given up": lambda: store.get_many([Want(key, (len(value),))] * len(pair)),
            "a put that is given up": lambda: store.put_many(pair),
        }
        for what, call in given_up.items():
            store.on_settled = lambda index, outcome: _give_up(store.calls[-1])
            self._many_times(store, call)
            store.on_settled = None
            self._still_serves(store, key, value, what)

    def test_writes_that_the_medium_refuses_leave_nothing_open(self) -> None:
        """A full disk is written to for hours: a descriptor left by each refusal ends the process."""
        self.bench.require_medium("network", "file", why="it refuses no write")
        for fault in (Fault.FULL, Fault.READ_ONLY):
            place = self.bench.place()
            store, (key, value) = self.bench.open(place), self.some_values(1)[0]
            self.put(store, key, value)
            reach, before, within = Reach(self.bench, place), handles(), {}
            with reach.faulty(fault, store):
                for n in range(_REFUSED_WRITES):
                    store.put(key if n % 2 else key_named(f"refused {n}"), value)
                    if fault is Fault.READ_ONLY and self.bench.capabilities.delete:
                        store.delete(key)
                within = handles()
            for name, count in handles().items():
                more = min(count, within[name]) - before[name]
                check(
                    more < _REFUSED_WRITES // 2,
                    f"{_REFUSED_WRITES} writes to a {fault.value} medium leave {more} {name} open",
                )

    def test_connections_that_break_leave_nothing_open(self) -> None:
        """A server that comes and goes breaks one with each call: those that are kept fill a table."""
        self.bench.require_medium("network", why="there is no connection")
        for fault in (Fault.RESET, Fault.KILLED):
            place = self.bench.place()
            store, (key, value) = self.bench.open(place), self.some_values(1)[0]
            self.put(store, key, value)
            before = handles()
            with Reach(self.bench, place).faulty(fault, store):
                for _ in range(_BROKEN_CALLS // 2):
                    store.get(key, len(value))
                    store.put(key, value)
            most = _BROKEN_CALLS // 4
            for name, more in more_handles(before, most, self.bench.harness.threads_end_s).items():
                told = f"{_BROKEN_CALLS} calls to a {fault.value} server leave {more} {name} open"
                check(more < most, told)

    # -- what these properties share -------------------------------------------------------------

    def _names(self, count: int) -> list[StorageKey]:
        """Up to `count` keys whose values of one page the bound has room for."""
        fitting = self.bench.harness.capacity_bytes // (3 * PAGE)
        return [key_named(f"one of many {n}") for n in range(max(min(count, fitting), 1))]

    def _in_batches(self, store: Store, things: Sequence[T]) -> Iterator[Sequence[T]]:
        size = min(self.bench.capabilities.max_batch or _MOST_AT_ONCE, _MOST_AT_ONCE)
        for start in range(0, len(things), size):
            yield things[start : start + size]
            store.calls.clear()

    def _all_are(self, statuses: Sequence[Status], due: Status, what: str) -> None:
        other = [place for place, status in enumerate(statuses) if status is not due]
        if other:
            said = statuses[other[0]].name
            check(
                False, f"{what} of {len(statuses)}: item {other[0]} is the first of {len(other)} to be {said}"
            )

    def _many_times(self, store: Store, call: Callable[[], object]) -> None:
        """As many times as matter, or as a slow store allows."""
        until = time.monotonic() + self.bench.harness.limit_s / 40
        with deadline_of(store, min(store.host.deadline_s, self.bench.harness.slack_s)):
            for _ in range(_BAD_CALLS):
                call()
                if time.monotonic() > until:
                    break
        store.calls.clear()

    def _still_serves(self, store: Store, key: StorageKey, value: bytes, what: str) -> None:
        with deadline_of(store, max(self.bench.harness.slack_s, 0.1)):
            self.holds(store, key, value, f"a stored value after {what}, many times")
            self.put(store, key, value)


def _give_up(call: RecordingCall) -> None:
    call.cancelled = True
