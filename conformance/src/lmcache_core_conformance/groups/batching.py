"""Batching: each item of a call is settled once, by itself, under its own index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Item, Outcome, Status
from lmcache_core_conformance.driver import Buffer, Got, RecordingCall, Store, Want
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.timing import Running, deadline_of
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Violation, check

_LATE_ITEMS = 16
_TRIES = 4
_POLL_S = 0.005
_ALLOWED = {
    "put": {Status.OK, Status.FULL, Status.FAILED},
    "get": {Status.OK, Status.MISS, Status.TOO_SMALL, Status.FAILED},
    "stat": {Status.OK, Status.MISS, Status.FAILED},
    "delete": {Status.OK, Status.MISS, Status.FAILED},
}


class Batching(Group):
    group = "batching"

    def test_each_item_is_settled_under_its_own_index(self) -> None:
        """Results that change places hand one chunk's bytes to another chunk's tokens."""
        store, values = self.bench.open(), self.some_values(self._batch(7))
        self._put_all(store, values)
        order = sorted(range(len(values)), key=lambda n: (n * 3) % len(values))
        got = store.get_many([Want(values[n][0], (len(values[n][1]),)) for n in order])
        stats = store.stat_many([values[n][0] for n in order])
        for place, n in enumerate(order):
            self.check_value(got[place], values[n][1], f"item {place} of a batch")
            check(stats[place].nbytes == len(values[n][1]), f"stat item {place} has another value's length")

    def test_hits_and_misses_mix_in_one_batch(self) -> None:
        """A prefix is asked for as one batch and ends somewhere in it: the miss must stand where it is."""
        store, values = self.bench.open(), self.some_values(self._batch(6))
        stored = values[::2]
        self._put_all(store, stored)
        got = store.get_many([Want(key, (len(value),)) for key, value in values])
        stats = store.stat_many([key for key, _ in values])
        for place, (_, value) in enumerate(values):
            if place % 2 == 0:
                self.check_value(got[place], value, f"item {place}, stored")
                check(stats[place].status is Status.OK, f"stat item {place}: {stats[place].status.name}")
            else:
                check(got[place].status is Status.MISS, f"get item {place}: {got[place].status.name}")
                check(stats[place].status is Status.MISS, f"stat item {place}: {stats[place].status.name}")

    def test_a_key_may_occur_twice_in_a_batch(self) -> None:
        """Two requests share a prefix: every item is served, and one whole value wins a put."""
        store, key = self.bench.open(), key_named("twice")
        versions = [value_of(key, version, self.bench.fit(3)) for version in (1, 2)]
        outcomes = store.put_many([(key, value) for value in versions][: self._batch(2)])
        check(
            all(outcome.status is Status.OK for outcome in outcomes),
            f"put of one key twice: {[outcome.status.name for outcome in outcomes]}",
        )
        got = store.get_many([Want(key, (len(versions[0]),))] * self._batch(2))
        check(got[0].value in versions, "a key put twice in a batch is neither of its values")
        for reading in got:
            self.check_value(reading, got[0].value, "a key asked for twice in a batch")
        keys = [key] * self._batch(2)
        stats = [outcome.status.name for outcome in store.stat_many(keys)]
        check(set(stats) == {"OK"}, f"stat of one key twice: {stats}")
        if self.bench.capabilities.delete:
            deleted = [outcome.status for outcome in store.delete_many(keys)]
            allowed = {Status.OK, Status.MISS}
            due = Status.OK in deleted and set(deleted) <= allowed
            check(due, f"delete of one key twice: {[status.name for status in deleted]}")

    def test_an_empty_batch_returns_at_once(self) -> None:
        """A batch that cancellation emptied must not raise, wait or settle anything."""
        store = self.bench.open()
        methods = {
            "put_many": lambda call: store.backend.put_many([], call),
            "get_many": lambda call: store.backend.get_many([], call),
            "stat_many": lambda call: store.backend.stat_many([], call),
        }
        if self.bench.capabilities.delete:
            methods["delete_many"] = lambda call: store.backend.delete_many([], call)
        for name, method in methods.items():
            store.call(0, method)
            call = store.calls[-1]
            check(call.raised is None, f"{name} of nothing raised {call.raised!r}")
            check(not call.out_of_range, f"{name} of nothing settled items {call.out_of_range}")

    def test_a_batch_is_left_as_it_was_given(self) -> None:
        """What is tried again is found by its place: sorted or emptied, one chunk's bytes are another's."""
        store, values = self.bench.open(), self.some_values(self._batch(5))
        values.sort(key=lambda pair: pair[1])  # in no order of keys or lengths
        keys = [key for key, _ in values]
        buffers = [Buffer([len(value)], content=value) for _, value in values]
        given: list[Item] = [Item(key, b.views()) for key, b in zip(keys, buffers, strict=True)]
        items, names = list(given), list(keys)
        store.call(len(items), lambda call: store.backend.put_many(items, call))
        check(items == given, "put_many changed the list of items that it was given")
        store.call(len(items), lambda call: store.backend.get_many(items, call))
        check(items == given, "get_many changed the list of items that it was given")
        store.call(len(names), lambda call: store.backend.stat_many(names, call))
        check(names == keys, "stat_many changed the list of keys that it was given")
        if self.bench.capabilities.delete:
            store.call(len(names), lambda call: store.backend.delete_many(names, call))
            check(names == keys, "delete_many changed the list of keys that it was given")

    def test_a_batch_cancelled_before_it_starts_changes_nothing(self) -> None:
        """The engine has given the request up: its work takes the place of work that somebody waits for."""
        store, (key, value) = self.bench.open(), self.some_values(1)[0]
        self.put(store, key, value)
        absent, buffer = key_named("cancelled"), Buffer([len(value)], content=value)
        methods = {"put_many": lambda call: store.backend.put_many([Item(absent, buffer.views())], call)}
        if self.bench.capabilities.delete:
            methods["delete_many"] = lambda call: store.backend.delete_many([key], call)
        for name, method in methods.items():
            store.call(1, partial(_cancelled, method))
            status = store.calls[-1].outcomes[0].status
            check(status is Status.FAILED, f"{name} of a cancelled batch: {status.name}, due is FAILED")
        stat = store.stat(absent).status
        check(stat is Status.MISS, f"stat of a key whose put was cancelled: {stat.name}")
        self.holds(store, key, value, "a value whose deletion was cancelled")

    def test_a_batch_cancelled_under_way_settles_each_item_once_and_truly(self) -> None:
        """What was given up half-way is told wrongly, twice or never, and its memory is written to later."""
        store, values = self.bench.open(), self.some_values(self._batch(6))
        known = dict(values[::2])
        self._put_all(store, values[::2])
        new = [(key, value_of(key, 2, len(value))) for key, value in values]
        told = self._cancelled_under_way(store, store.backend.put_many, new)
        for place, ((key, value), put) in enumerate(zip(new, told, strict=True)):
            got, what = store.get(key, len(value)), f"item {place} of a cancelled put"
            if put.status is Status.OK or got.value == value:
                self.check_value(got, value, f"{what} that ended {put.status.name}")
                known[key] = value
            elif key in known:
                self.check_value(got, known[key], f"{what} that ended {put.status.name}")
            else:
                check(got.status is not Status.OK, f"get of {what}, not stored: OK, with other bytes")
        told = self._cancelled_under_way(store, store.backend.get_many, new)
        for place, ((key, _), got) in enumerate(zip(new, told, strict=True)):
            true = got.status is not Status.OK or got.value == known.get(key)
            check(true, f"item {place} of a cancelled get ended OK with other bytes than are stored")

    @needs("max_in_flight")
    def test_an_item_that_is_settled_is_there(self) -> None:
        """Settled is used at once: a value announced before it is stored is a hit that misses."""
        if self.bench.capabilities.asynchronous:
            raise NotApplicable("capability asynchronous is True: its completion thread can't be held up")
        store, values = self.bench.open(), self.some_values(self._batch(3))
        seen: list[Status] = []

        def look(index: int, outcome: Outcome) -> None:
            key, value = values[index]
            store.on_settled = None
            reading = Running(lambda: store.get(key, len(value)).status)
            if reading.ended.wait(self.bench.harness.meeting_s):  # else it waits for the put, and sees no gap
                seen.append(reading.result())
                store.on_settled = look

        for _ in range(2):  # new values, then values that replace
            store.on_settled = look
            self._put_all(store, values)
            store.on_settled = None
        missing = [status.name for status in seen if status is not Status.OK]
        check(not missing, f"at the moment when a put is settled OK, get gives {missing}")

    def test_a_batch_does_nothing_more_once_its_time_is_over(self) -> None:
        """A deadline looked at once a batch is none: a long prefix on a slow disk is read to its end."""
        self.bench.require_medium("file", "network", why="what is done too late can't be seen from outside")
        count = min(_LATE_ITEMS, self.bench.capabilities.max_batch or _LATE_ITEMS)
        if count < _LATE_ITEMS // 2:
            raise NotApplicable(f"capability max_batch is {count}: such a batch is soon at its end")
        place = self.bench.place()
        store, reach, hook = self.bench.open(place), Reach(self.bench, place), self.bench.harness.raw_get
        keys = [key_named(f"late {n}") for n in range(count)]
        values = [(key, value_of(key, 1, PAGE)) for key in keys]
        there: list[int] = []

        def look() -> None:
            there.append(sum(hook(place.directory, key) is not None for key in keys))

        def remove_all() -> None:
            for key in keys:
                reach.raw_delete(key)

        self._held_beyond_its_deadline(store, lambda: [o.status for o in store.put_many(values)], look)
        look()
        check(there[-2], "harness hook `raw_get` sees nothing of a stored value")
        late = there[-1] - there[-2]
        check(late <= count // 2, f"of a batch of {count} puts, {late} were done after its deadline")
        for key, value in values:
            self.put(store, key, value)
        wants = [Want(key, (PAGE,)) for key in keys]
        read = self._held_beyond_its_deadline(
            store, lambda: [got.status for got in store.get_many(wants)], remove_all
        )
        late = read.count(Status.MISS)  # those that were looked for when all had been removed
        check(late <= count // 2, f"of a batch of {count} gets, {late} were done after its deadline")

    @needs("max_batch")
    def test_a_batch_of_the_declared_maximum_is_taken_by_every_operation(self) -> None:
        """A limit that holds for one operation only fails the others' full batches."""
        store, count = self.bench.open(), self.bench.capabilities.max_batch or 1
        keys = [key_named(f"full batch {n}") for n in range(count)]
        self._put_all(store, [(key, value_of(key, 1, PAGE)) for key in keys])
        stats = store.stat_many(keys)
        check({outcome.status for outcome in stats} == {Status.OK}, f"stat of {count} stored keys is not OK")
        if self.bench.capabilities.delete:
            gone = store.delete_many(keys)
            check({outcome.status for outcome in gone} == {Status.OK}, f"delete of {count} keys is not OK")
            left = store.stat_many(keys)
            check({outcome.status for outcome in left} == {Status.MISS}, "a full batch left something behind")

    def test_a_batch_of_the_maximum_number_of_items_is_taken(self) -> None:
        """The core fills batches up to what is declared; the last item must be treated as the first."""
        count = self.bench.capabilities.max_batch or 64
        store = self.bench.open()
        keys = [key_named(f"batch-{n}") for n in range(min(count, 512))]
        values = [(key, value_of(key, 1, PAGE)) for key in keys]
        self._put_all(store, values)
        got = store.get_many([Want(key, (PAGE,)) for key in keys])
        for place, (_, value) in enumerate(values):
            self.check_value(got[place], value, f"item {place} of {len(values)}")

    def test_one_bad_get_leaves_the_others(self) -> None:
        """One chunk that doesn't fit must cost one chunk, not the whole prefix."""
        store, values = self.bench.open(), self.some_values(self._batch(4), pages=3)
        self._put_all(store, values)
        bad = len(values) // 2
        if len(values[bad][1]) == PAGE:
            raise NotApplicable("capability max_value_bytes is one page: no view is too small")
        wants = [Want(key, (PAGE if n == bad else len(v),)) for n, (key, v) in enumerate(values)]
        got = store.get_many(wants)
        for place, (_, value) in enumerate(values):
            if place == bad:
                check(got[place].status is not Status.OK, "a view that is too small ended OK")
            else:
                self.check_value(got[place], value, f"item {place} beside one with too small a view")

    @needs("max_value_bytes")
    def test_one_bad_put_leaves_the_others(self) -> None:
        """One refused chunk must not lose the chunks stored with it."""
        store, values = self.bench.open(), self.some_values(self._batch(4))
        bad = len(values) // 2
        key = key_named("oversized")
        values[bad] = (key, value_of(key, 1, self.maximum() + PAGE))
        outcomes = store.put_many(values)
        for place, (other, value) in enumerate(values):
            if place == bad:
                check(outcomes[place].status is not Status.OK, "a value over the maximum ended OK")
            else:
                check(outcomes[place].status is Status.OK, f"item {place}: {outcomes[place].status.name}")
                self.holds(store, other, value, f"item {place} beside a refused one")

    def test_every_item_is_settled_exactly_once_with_a_status_of_its_operation(self) -> None:
        """An item never settled waits for its deadline; one settled twice, or TIMEOUT by a backend, lies."""
        store, values = self.bench.open(), self.some_values(self._batch(4))
        absent = key_named("absent")
        keys = [key for key, _ in values]
        self._settled(store, "put", [o.status for o in store.put_many(values)])
        wants = [Want(key, (PAGE if n == 0 else self.bench.fit(8),)) for n, key in enumerate(keys)]
        self._settled(
            store, "get", [got.status for got in store.get_many([*wants[:-1], Want(absent, (PAGE,))])]
        )
        self._settled(store, "stat", [o.status for o in store.stat_many([absent, *keys[1:]])])
        if self.bench.capabilities.delete:
            self._settled(store, "delete", [o.status for o in store.delete_many([absent, *keys[1:]])])

    def _held_beyond_its_deadline(
        self, store: Store, call: Callable[[], list[Status]], over: Callable[[], None]
    ) -> list[Status]:
        """How the items of a call end that is held up where its first one is settled, until its time is over.

        What is under way by itself ends meanwhile. `over` is called at that moment, before the call goes on.
        """
        held, go_on = threading.Event(), threading.Event()

        def hold(index: int, outcome: Outcome) -> None:
            if outcome.status is Status.OK and not held.is_set():
                held.set()
                go_on.wait(self.bench.harness.deadline_s)

        store.on_settled = hold
        try:
            for deadline_s in (self.bench.harness.stalled_deadline_s * 4**n for n in range(_TRIES)):
                with deadline_of(store, deadline_s):
                    running = Running(call)
                    while not held.wait(_POLL_S) and not running.ended.is_set():
                        continue
                    if held.is_set():  # else its time was over before
                        go_on.wait(max(store.calls[-1].deadline - time.monotonic(), 0.0))
                        over()
                        go_on.set()
                        running.ended.wait(self.bench.harness.deadline_s)
                        return running.result()
        finally:
            go_on.set()
            store.on_settled = None
        raise Violation(f"of a batch of values of a page, none was settled OK within {deadline_s:g} s")

    def _cancelled_under_way(
        self,
        store: Store,
        method: Callable[[Sequence[Item], Call], None],
        values: Sequence[tuple[StorageKey, bytes]],
    ) -> list[Got]:
        """One call of it for memory that holds `values`, cancelled when its first item is settled.

        Raises:
            Violation: an item was not settled once, or its memory not let go of.
        """

        def cancel(index: int, outcome: Outcome) -> None:
            store.calls[-1].cancelled = True

        buffers = [Buffer([len(value)], content=value) for _, value in values]

        def call_it(call: Call) -> None:
            method([Item(key, b.views()) for (key, _), b in zip(values, buffers, strict=True)], call)

        store.on_settled = cancel
        outcomes = store.call(len(values), call_it)
        store.on_settled = None
        call, name = store.calls[-1], f"cancelled {method.__name__}"
        left = call.unsettled_at_return if call.raised is None else []
        check(not left, f"a {name} left items {left} unsettled")
        check(not call.repeated, f"a {name} settled items {call.repeated} again")
        check(not call.out_of_range, f"a {name} settled items {call.out_of_range}, which don't exist")
        seen = [Got(end, buffer.read()) for end, buffer in zip(outcomes, buffers, strict=True)]
        for buffer in buffers:
            buffer.make_noise()
        for key, value in values:
            store.get(key, len(value))
        for place, buffer in enumerate(buffers):
            check(buffer.is_noise_from(0), f"item {place} of a {name} was written to afterwards")
            check(buffer.free(), f"something still refers to the memory of item {place} of a {name}")
        return seen

    def _settled(self, store: Store, operation: str, statuses: list[Status]) -> None:
        call: RecordingCall = store.calls[-1]
        check(call.raised is None, f"{operation} raised {call.raised!r}")
        check(not call.unsettled_at_return, f"{operation} left items {call.unsettled_at_return} unsettled")
        check(not call.repeated, f"{operation} settled items {call.repeated} again")
        check(not call.out_of_range, f"{operation} settled items {call.out_of_range}, which don't exist")
        wrong = [status.name for status in statuses if status not in _ALLOWED[operation]]
        check(not wrong, f"{operation} ended {wrong}, which is not its to say")
        for outcome in call.outcomes:
            failed = outcome.status is Status.FAILED
            check(not failed or outcome.error is not None, f"{operation} FAILED without an error")

    def _put_all(self, store: Store, values: Sequence[tuple[StorageKey, bytes]]) -> None:
        outcomes = store.put_many(values)
        for place, outcome in enumerate(outcomes):
            check(outcome.status is Status.OK, f"put item {place}: {outcome.status.name} ({outcome.error})")

    def _batch(self, count: int) -> int:
        return min(count, self.bench.capabilities.max_batch or count)


def _cancelled(method: Callable[[Call], None], call: Call) -> None:
    if isinstance(call, RecordingCall):
        call.cancelled = True
    method(call)
