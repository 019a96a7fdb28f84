"""Concurrency: calls that overlap behave as if they had come one after another."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable
from functools import partial

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Item, Outcome, Status
from lmcache_core_conformance.bench import spread
from lmcache_core_conformance.driver import Buffer, Got, Store, Want
from lmcache_core_conformance.history import ABSENT, History, Kind, Version, is_linearizable
from lmcache_core_conformance.preemption import interrupt
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.timing import affordable
from lmcache_core_conformance.values import PAGE, difference, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Violation, check
from lmcache_core_conformance.watch import rounds

_MAX_THREADS = 4
_OPERATIONS_A_HISTORY = 40


class Concurrency(Group):
    group = "concurrency"

    @needs("max_in_flight")
    def test_writers_of_different_keys_do_not_disturb_each_other(self) -> None:
        """A buffer, offset or name shared between calls writes one chunk's bytes under another's key."""
        store = self.bench.open()

        def writer(name: int) -> Callable[[], None]:
            def write() -> None:
                for n in rounds(range(self.bench.harness.rounds // 4 + 1)):
                    key = key_named(f"writer-{name}-{n % 3}")
                    value = value_of(key, n, self.bench.fit(1 + n % 4))
                    self.put(store, key, value)
                    self.holds(store, key, value, f"writer {name}'s own value")

            return write

        self.bench.race(store, *(writer(n) for n in range(self._threads())))

    @needs("max_in_flight")
    def test_an_overwrite_is_seen_whole_by_readers(self) -> None:
        """A reader that sees half of a new value and half of the old one attends to neither's tokens."""
        store, key = self.bench.open(), key_named("overwritten")
        values = [value_of(key, version, self.bench.fit(4 + version % 2)) for version in range(4)]
        self.put(store, key, values[0])
        largest, writing = self.bench.fit(5), [True]
        under_way = [threading.Event() for _ in range(self._threads() - 1)]

        def write() -> None:
            try:
                for reader in under_way:
                    reader.wait()
                for n in rounds(range(1, self.bench.harness.rounds // 4 + 2)):
                    if not writing[0]:
                        break
                    self.put(store, key, values[n % len(values)])
            finally:
                writing[0] = False

        def reader(event: threading.Event) -> Callable[[], None]:
            def read() -> None:
                try:
                    while writing[0]:
                        got = store.get(key, largest)
                        check(got.status is Status.OK, f"get during an overwrite: {got.status.name}")
                        if got.value not in values:
                            raise Violation(
                                f"a reader saw no whole version: {difference(values[0], got.value)}"
                            )
                        event.set()
                except BaseException:
                    writing[0] = False
                    raise
                finally:
                    event.set()

            return read

        self.bench.race(store, write, *(reader(event) for event in under_way))

    @needs("max_in_flight")
    def test_a_call_held_up_at_any_line_does_not_spoil_another(self) -> None:
        """Between any two lines another thread may get its turn: a miss or a mixture there is a real one."""
        names = ("put", "get", "delete") if self.bench.capabilities.delete else ("put", "get")
        pairs = [*itertools.product(names, (*names, "put beside")), ("first put", "stat and get")]
        lines, store = self._lines(calls=6 * len(pairs)), self.bench.open()
        for number, (first, second) in enumerate(pairs):
            uncut = _Register(store, f"uncut-{number}", self.bench.fit(2))
            total = uncut.interrupted(first, 0, second)
            for line in rounds(spread(total, lines)):
                register = _Register(store, f"held-up-{number}-{line}", self.bench.fit(2))
                register.interrupted(first, line, second)

    @needs("max_in_flight")
    def test_racing_calls_on_one_key_have_an_order_that_explains_them(self) -> None:
        """A read that goes back in time (stale cache, lost delete) shows in no single call: record all."""
        store = self.bench.open()
        per_thread = max(_OPERATIONS_A_HISTORY // self._threads(), 3)
        for number in rounds(range(max(self.bench.harness.rounds // 10, 1))):
            register = _Register(store, f"race-{number}", self.bench.fit(2))
            workers = [
                register.worker(random.Random(number * 10 + n), per_thread)  # noqa: S311
                for n in range(self._threads())
            ]
            self.bench.race(store, *workers, seed=number)
            register.check()

    @needs("max_in_flight")
    def test_batches_that_overlap_neither_mix_nor_wait_for_each_other(self) -> None:
        """Two requests share chunks and name them in any order: each batch ends, with its own results."""
        count = min(3, self.bench.capabilities.max_batch or 3)
        if count < 2:
            raise NotApplicable("capability max_batch is 1")
        half, store = max(self._lines(calls=4 * 3) // 2, 1), self.bench.open()
        batches = _Batches(store, [key_named(f"overlap {n}") for n in range(count)], self.bench.fit)
        for first, second in (("put", "put"), ("get", "get"), ("get", "put"), ("stat", "stat")):
            total = self._interrupt(partial(batches.run, first), 0, _nothing)
            early = range(1, min(total, half) + 1)  # where a call takes its locks, each line counts
            for line in rounds(sorted({*early, *spread(total, half)})):
                try:
                    self._interrupt(partial(batches.run, first), line, partial(batches.run, second, -1))
                    batches.run("get")
                except Violation as violation:
                    raise Violation(f"{second} while {first} was at its line {line}: {violation}") from None

    @needs("max_in_flight")
    def test_a_value_that_grows_during_a_get_stays_inside_the_views(self) -> None:
        """Looked up at one length and read at another, it lands in the frames behind the views."""
        lines, key = self._lines(calls=3), key_named("growing")
        store = self.bench.open()
        short, long = value_of(key, 1, self.bench.fit(2)), value_of(key, 2, self.bench.fit(4))
        if len(short) == len(long):
            raise NotApplicable(f"capability max_value_bytes is {len(long)}: a value has no room to grow")

        def get() -> None:
            buffer = Buffer([PAGE] * (len(short) // PAGE), gap=4 * PAGE)
            item = Item(key, buffer.views())
            outcome = store.call(1, lambda call: store.backend.get_many([item], call))[0]
            check(buffer.outside_is_noise(), "a get wrote outside its views")
            told = outcome.status is Status.TOO_SMALL
            whole = outcome.status is Status.OK and outcome.nbytes == len(short) and buffer.read() == short
            check(told or whole, f"get while the value grew: {outcome.status.name}, {outcome.nbytes} bytes")

        self.put(store, key, short)
        for line in rounds(spread(self._interrupt(get, 0, _nothing), lines)):
            self.put(store, key, short)
            self._interrupt(get, line, lambda: self.put(store, key, long))

    @needs("max_in_flight")
    def test_scans_and_stats_beside_a_writer_tell_what_is_there(self) -> None:
        """An index is rebuilt, and a tier is watched, while it is in use: neither may fail or invent."""
        arriving = [(key_named(f"arriving {n}"), PAGE) for n in range(self._lines(calls=2 * 4))]
        store, values = self.bench.open(), self.some_values(6)
        for key, value in values:
            self.put(store, key, value)
        staying = {key: len(value) for key, value in values}
        known = staying | dict(arriving)

        def look() -> None:
            entries = store.stats().entries
            unknown = self.bench.capabilities.shared and entries == 0  # asking would be I/O
            check(unknown or entries >= len(staying), f"{len(staying)} values stay, stats counts {entries}")

        def scan() -> None:
            found = {entry.key: entry.nbytes for entry in store.scan()}
            wrong = [key for key in found if found[key] != known.get(key)]
            check(not wrong, f"a scan beside a put lists {len(wrong)} values that never were")
            check(staying.keys() <= found.keys(), "a scan beside a put leaves out values that stay")

        for reading in (look, scan) if self.bench.capabilities.scan else (look,):
            lines = spread(self._interrupt(reading, 0, _nothing), len(arriving))
            for line, (key, nbytes) in zip(lines, arriving, strict=False):
                self._interrupt(reading, line, partial(self.put, store, key, value_of(key, 1, nbytes)))
                if self.bench.capabilities.delete:
                    store.delete(key)

    @needs("max_in_flight")
    def test_as_many_calls_as_declared_run_at_once(self) -> None:
        """The core keeps `max_in_flight` calls inside: each must be served, not refused or mixed up."""
        store = self.bench.open()
        count = min(self.bench.capabilities.max_in_flight, 64)
        values = self.some_values(count)
        meeting = threading.Barrier(count)

        def meet() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(
                    self.bench.harness.meeting_s
                )  # a backend that lets one in after the other never meets

        def caller(n: int) -> Callable[[], None]:
            def work() -> None:
                key, value = values[n]
                self.put(store, key, value)
                self.holds(store, key, value, f"call {n} of {count} at once")
                check(store.stat(key).status is Status.OK, f"stat of call {n} of {count} at once")

            return work

        if not self.bench.capabilities.asynchronous:  # its completion thread must not be held up
            store.before_settling = meet
        self.bench.race(store, *(caller(n) for n in range(count)))

    def _lines(self, *, calls: int) -> int:
        """At how many lines of a call it is interrupted, where that takes `calls` calls for each.

        To be asked before a store is opened, beside which the one that is timed would be a second.
        """
        return affordable(self.bench, self.bench.harness.interruptions, calls)

    def _interrupt(self, first: Callable[[], None], line: int, second: Callable[[], None]) -> int:
        return interrupt(first, line, second, 4 * self.bench.harness.slack_s)

    def _threads(self) -> int:
        return min(self.bench.capabilities.max_in_flight, _MAX_THREADS)


class _Batches:
    """Batches of the same keys, whose values all differ in length from key to key."""

    def __init__(self, store: Store, keys: list[StorageKey], fit: Callable[[int], int]) -> None:
        self._store = store
        self._lengths = {key: fit(1 + n) for n, key in enumerate(keys)}
        self._keys = keys
        self._versions = itertools.count()  # next() is atomic under the GIL
        self._known: dict[bytes, StorageKey] = {}
        self.run("put")

    def run(self, operation: str, step: int = 1) -> None:
        """One batch of all keys, in the order given or (-1) the other way round.

        Raises:
            Violation: an item's result isn't its own.
        """
        keys = self._keys[::step]
        if operation == "put":
            version = next(self._versions)
            values = [(key, value_of(key, version, self._lengths[key])) for key in keys]
            self._known |= {value: key for key, value in values}
            seen = [outcome.status for outcome in self._store.put_many(values)]
            check(set(seen) == {Status.OK}, f"a batch of puts ended {[status.name for status in seen]}")
        elif operation == "stat":
            for outcome in self._store.stat_many(keys):
                check(outcome.status is Status.OK, f"stat of a batch: {outcome.status.name}")
        else:
            wants = [Want(key, (self._lengths[key],)) for key in keys]
            for key, got in zip(keys, self._store.get_many(wants), strict=True):
                own = got.status is Status.OK and self._known.get(got.value) == key
                check(own, f"get of a batch: {got.status.name}, not a value of its own key")


class _Register:
    """One key under racing puts, gets and deletes, with the history of what each saw."""

    def __init__(self, store: Store, name: str, nbytes: int) -> None:
        self._store = store
        self._key = key_named(name)
        self._nbytes = nbytes
        self._history = History()
        self._versions = itertools.count()  # next() is atomic under the GIL
        self._version_of: dict[bytes, Version] = {}

    def worker(self, choices: random.Random, count: int) -> Callable[[], None]:
        """A thread's work: `count` operations as `choices` falls."""
        operations = [self._put, self._get, self._get]
        if self._store.capabilities.delete:
            operations.append(self._delete)

        def work() -> None:
            for _ in rounds(range(count)):
                choices.choice(operations)()

        return work

    def interrupted(self, first: str, line: int, second: str) -> int:
        """One call, another in the middle of it, and what is seen afterwards; the lines of the first.

        Raises:
            Violation: as `check`; the message of the calls' own faults says where they were.
        """
        operations = {
            "put": self._put,
            "get": self._get,
            "delete": self._delete,
            "first put": self._put,
            "stat and get": self._stat_and_get,
            "put beside": self._put_beside,
        }
        try:
            if first != "first put":
                self._put()
            total = interrupt(operations[first], line, operations[second])
            self._get()
            self._get()
            self.check()
        except Violation as violation:
            when = f"while {first} was at its line {line}" if line else f"after {first}"
            raise Violation(f"{second} {when}: {violation}") from None
        return total

    def _put_beside(self) -> None:
        key = key_named(f"beside {self._key}")
        value = value_of(key, 1, self._nbytes)
        check(self._store.put(key, value).status is Status.OK, "put of another key failed")
        got = self._store.get(key, self._nbytes)
        check(got.value == value, f"another key's value: {got.status.name}, {difference(value, got.value)}")

    def check(self) -> None:
        """
        Raises:
            Violation: no order of the recorded calls explains what they saw.
        """
        operations = self._history.operations
        if not is_linearizable(operations):
            story = "; ".join(
                f"{o.kind.value} {'nothing' if o.version == ABSENT else o.version} [{o.started}-{o.ended}]"
                for o in operations
            )
            raise Violation(f"no order of these calls explains what they saw: {story}")

    def _put(self) -> None:
        version = next(self._versions)
        value = value_of(self._key, version, self._nbytes)
        self._version_of[value] = version

        def judge(outcome: Outcome) -> tuple[Kind, Version] | None:
            if outcome.status is Status.FULL:
                return None
            return Kind.WRITE if outcome.status is Status.OK else Kind.MAYBE, version

        self._history.record(lambda: self._store.put(self._key, value), judge)

    def _get(self) -> None:
        def judge(got: Got) -> tuple[Kind, Version]:
            if got.status is Status.MISS:
                return Kind.READ, ABSENT
            check(got.status is Status.OK, f"get in a race: {got.status.name} ({got.outcome.error})")
            check(got.value in self._version_of, "get in a race returned no whole version")
            return Kind.READ, self._version_of[got.value]

        self._history.record(lambda: self._store.get(self._key, self._nbytes), judge)

    def _stat_and_get(self) -> None:
        def judge(outcome: Outcome) -> tuple[Kind, Version]:
            if outcome.status is Status.MISS:
                return Kind.READ, ABSENT
            check(outcome.status is Status.OK, f"stat in a race: {outcome.status.name} ({outcome.error})")
            return Kind.PRESENT, ABSENT

        self._history.record(lambda: self._store.stat(self._key), judge)
        self._get()

    def _delete(self) -> None:
        def judge(outcome: Outcome) -> tuple[Kind, Version]:
            if outcome.status is Status.MISS:
                return Kind.READ, ABSENT
            return Kind.WRITE if outcome.status is Status.OK else Kind.MAYBE, ABSENT

        self._history.record(lambda: self._store.delete(self._key), judge)


def _nothing() -> None:
    """What interrupts a call whose lines are only counted."""
