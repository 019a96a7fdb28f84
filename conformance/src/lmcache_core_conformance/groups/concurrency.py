"""Concurrency: calls that overlap behave as if they had come one after another."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable

from lmcache_core.storage.contract import Outcome, Status
from lmcache_core_conformance.bench import spread
from lmcache_core_conformance.driver import Got, Store
from lmcache_core_conformance.history import ABSENT, History, Kind, Version, is_linearizable
from lmcache_core_conformance.preemption import interrupt
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.values import difference, key_named, value_of
from lmcache_core_conformance.verdicts import Violation, check

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
                for n in range(self.bench.harness.rounds // 4 + 1):
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
                for n in range(1, self.bench.harness.rounds // 4 + 2):
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
        store, number = self.bench.open(), 0
        names = ("put", "get", "delete") if self.bench.capabilities.delete else ("put", "get")
        for first in names:
            for second in (*names, "put beside"):
                number += 1
                uncut = _Register(store, f"uncut-{number}", self.bench.fit(2))
                total = uncut.interrupted(first, 0, second)
                for line in spread(total, self.bench.harness.interruptions):
                    register = _Register(store, f"held-up-{number}-{line}", self.bench.fit(2))
                    register.interrupted(first, line, second)

    @needs("max_in_flight")
    def test_racing_calls_on_one_key_have_an_order_that_explains_them(self) -> None:
        """A read that goes back in time (stale cache, lost delete) shows in no single call: record all."""
        store = self.bench.open()
        per_thread = max(_OPERATIONS_A_HISTORY // self._threads(), 3)
        for number in range(max(self.bench.harness.rounds // 10, 1)):
            register = _Register(store, f"race-{number}", self.bench.fit(2))
            workers = [
                register.worker(random.Random(number * 10 + n), per_thread)  # noqa: S311
                for n in range(self._threads())
            ]
            self.bench.race(store, *workers, seed=number)
            register.check()

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

    def _threads(self) -> int:
        return min(self.bench.capabilities.max_in_flight, _MAX_THREADS)


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
            for _ in range(count):
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
            "put beside": self._put_beside,
        }
        try:
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

    def _delete(self) -> None:
        def judge(outcome: Outcome) -> tuple[Kind, Version]:
            if outcome.status is Status.MISS:
                return Kind.READ, ABSENT
            return Kind.WRITE if outcome.status is Status.OK else Kind.MAYBE, ABSENT

        self._history.record(lambda: self._store.delete(self._key), judge)
