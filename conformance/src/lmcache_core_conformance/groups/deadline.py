"""Deadline and cancellation: nobody waits longer than asked, and no memory is let go too early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from lmcache_core.errors import BackendClosed, DeadlineExceeded, LMCacheError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage import Operation
from lmcache_core.storage.contract import Call, Outcome, Status
from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.core import Core, FrameJob
from lmcache_core_conformance.driver import Got, Store, Want
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.timing import Running, deadline_of, in_time
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import check

T = TypeVar("T")
_NO_SERVER = "there is no server that could keep a call waiting"
_TRIES = 3
_MOST_STALLED = 64
_POLL_S = 0.005


class Deadline(Group):
    group = "deadline"

    def test_an_expired_call_changes_nothing(self) -> None:
        """Work that nobody waits for any more takes the place of work that somebody does."""
        store = self.bench.open()
        key, absent = key_named("expired"), key_named("never in time")
        value = value_of(key, 1, self.bench.fit(2))
        self.put(store, key, value)
        with deadline_of(store, -1.0):
            self._is_late(store.put(absent, value), "put")
            self._is_late(store.get(key, len(value)).outcome, "get")
            if self.bench.capabilities.delete:
                self._is_late(store.delete(key), "delete")
        self.lacks(store, absent, len(value), "a key whose put came too late")
        self.holds(store, key, value, "a value after calls that came too late")

    def test_an_expired_call_asks_the_store_nothing(self) -> None:
        """A store in trouble is made worse by requests whose answers nobody will read."""
        self.bench.require_medium("network", why="there is no server to be asked")
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("expired")
        self.put(store, key, value_of(key, 1, PAGE))

        def too_late() -> None:
            with deadline_of(store, -1.0):
                store.put(key, value_of(key, 2, PAGE))
                store.get(key, PAGE)
                store.stat(key)

        asked = Reach(self.bench, place).requests_of(store, too_late)
        check(asked == 0, f"{asked} requests were sent for calls whose deadline had passed")

    def test_a_stalled_store_holds_no_call_beyond_its_deadline(self) -> None:
        """A store that takes requests and never answers is the usual outage: each wait needs its bound."""
        self.bench.require_medium("network", why=_NO_SERVER)
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("stalled")
        value = value_of(key, 1, self.bench.fit(2))
        self.put(store, key, value)
        served, own = key_named("served before"), value_of(key_named("served before"), 1, len(value))
        self.put(store, served, own)
        wants = [Want(asked, (len(value),)) for asked in (key, *self._many_absent())]
        calls: dict[str, Callable[[], Outcome]] = {
            "get": lambda: store.get_many(wants)[0].outcome,
            "put": lambda: store.put(key_named("other"), value),
        }
        if self.bench.capabilities.shared:  # else it may know what it stored without asking
            calls["stat"] = lambda: store.stat(key)
        if self.bench.capabilities.delete:
            self.put(store, key_named("another"), value)
            calls["delete"] = lambda: store.delete(key_named("another"))
        if self.bench.capabilities.pin:
            calls["pin"] = lambda: store.call(1, lambda call: store.backend.pin_many([key], 1.0, call))[0]
        if self.bench.capabilities.scan and self.bench.capabilities.shared:
            calls["scan"] = lambda: store.call(1, partial(_scan, store))[0]
        with deadline_of(store, self.bench.harness.stalled_deadline_s):
            for name, call in calls.items():
                with Reach(self.bench, place).faulty(Fault.STALLED, store):
                    outcome = self._in_time(f"{name} of a stalled store", call)
                    check(
                        outcome.status is Status.FAILED, f"{name} of a stalled store: {outcome.status.name}"
                    )
                    check(
                        outcome.error is not None and outcome.error.retryable,
                        f"{name} of a stalled store failed with {outcome.error!r}, which is not retryable",
                    )
        self._opens_in_time(place)
        self.holds(store, served, own, "a value after its store had stalled")  # no late answer about another
        self.holds(store, key, value, "a value whose get had stalled")

    @needs("max_in_flight")
    def test_a_call_behind_a_stalled_one_keeps_its_own_deadline(self) -> None:
        """Who waits for a lock or a connection that a hung call has waits as long as that one does."""
        self.bench.require_medium("network", why=_NO_SERVER)
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("stalled")
        value = value_of(key, 1, self.bench.fit(2))
        self.put(store, key, value)
        with Reach(self.bench, place).faulty(Fault.STALLED, store):
            first = self._stalled(store, key)
            with deadline_of(store, self.bench.harness.stalled_deadline_s):
                got = self._in_time("get behind a stalled one", lambda: store.get(key, len(value)))
                check(got.status is Status.FAILED, f"get behind a stalled one: {got.status.name}")
                put = self._in_time("put behind a stalled get", lambda: store.put(key_named("other"), value))
                check(put.status is Status.FAILED, f"put behind a stalled get: {put.status.name}")
        check(first.ended.wait(self.bench.harness.deadline_s), "a call did not end with the stall")
        self.holds(store, key, value, "a value after its store had stalled")

    def test_a_trickling_answer_does_not_stretch_the_deadline(self) -> None:
        """A time-out for each read is none for the call: a byte now and then keeps it alive for hours."""
        self.bench.require_medium("network", why=_NO_SERVER)
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("trickling")
        value = value_of(key, 1, self.bench.fit(16))
        self.put(store, key, value)
        with (
            Reach(self.bench, place).faulty(Fault.TRICKLING, store),
            deadline_of(store, self.bench.harness.stalled_deadline_s),
        ):
            got = self._in_time("get of a trickling value", lambda: store.get(key, len(value)))
            check(got.status is Status.FAILED, f"get of a trickling value: {got.status.name}")
        self.holds(store, key, value, "a value after it had trickled")

    def test_a_call_cancelled_while_its_answer_trickles_ends(self) -> None:
        """Nobody waits for it any more: its connection and its place are another call's until it ends."""
        self.bench.require_medium("network", why=_NO_SERVER)
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("cancelled")
        value = value_of(key, 1, self.bench.fit(16))
        self.put(store, key, value)
        with Reach(self.bench, place).faulty(Fault.TRICKLING, store):
            running = self._held_up(store, lambda: store.get(key, len(value)))
            store.calls[-1].cancelled = True
            ended = running.ended.wait(self.bench.harness.slack_s)
        running.ended.wait(self.bench.harness.deadline_s)
        check(ended, f"a get went on for {self.bench.harness.slack_s:g} s after it was cancelled")
        status = running.result().status
        check(status is Status.FAILED, f"a get cancelled while its answer trickled: {status.name}")
        self.holds(store, key, value, "a value whose get was cancelled")

    def test_close_wakes_a_call_that_waits(self) -> None:
        """An engine that shuts down must not wait for the slowest of its stores."""
        self.bench.require_medium("network", why=_NO_SERVER)
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("woken")
        self.put(store, key, value_of(key, 1, PAGE))
        with Reach(self.bench, place).faulty(Fault.STALLED, store):
            waiting = self._stalled(store, key)
            self._in_time("close", store.backend.close)
            ended = waiting.ended.wait(self.bench.harness.slack_s)
        waiting.ended.wait(self.bench.harness.deadline_s)
        check(ended, "a call went on waiting after close")

    def test_close_does_not_wait_for_a_stalled_call(self) -> None:
        """A disk that hangs may hang for ever: closing its tier must not hang with it."""
        self.bench.require_medium("network", "file", why="nothing behind it can stall")
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("left behind")
        self.put(store, key, value_of(key, 1, PAGE))
        with Reach(self.bench, place).faulty(Fault.STALLED, store):
            running = self._stalled(store, key)
            self._in_time("close", store.backend.close)
        check(running.ended.wait(self.bench.harness.deadline_s), "a call did not end with the stall")

    def test_stats_are_told_while_a_put_stalls(self) -> None:
        """They are looked at when a store is in trouble: figures that wait for it can't show that it is."""
        self.bench.require_medium("network", "file", why="nothing behind it can stall")
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("stalled put")
        value = value_of(key, 1, PAGE)
        self.put(store, key, value)
        with Reach(self.bench, place).faulty(Fault.STALLED, store):
            waiting: Running[Outcome] | Running[Got]
            waiting = self._held_up(store, lambda: store.put(key_named("another"), value))
            if waiting.ended.is_set():  # it was taken without the medium
                waiting = self._stalled(store, key)
            in_time("stats while a put stalls", store.stats, self.bench.harness.slack_s)
        check(waiting.ended.wait(self.bench.harness.deadline_s), "a call did not end with the stall")

    def test_the_memory_of_a_late_read_is_kept_until_the_backend_lets_go(self) -> None:
        """Memory given to the next request while a read is still under way receives that read's bytes."""
        core, job = self._late(Operation.GET, key_named("late read"))
        check(job.outcomes[0].status is not Status.OK, "a get of a stalled store ended OK")
        core.check_untouched(job)

    def test_a_put_that_lands_late_tells_the_truth(self) -> None:
        """The index is corrected by it: OK for what isn't there is a hit that never comes."""
        key = key_named("late write")
        core, job = self._late(Operation.PUT, key)
        ends = [job.landings.get(0), job.outcomes[0]]
        outcome, value = core.get(key, len(self.frame(key, 2)))
        old, new = self.frame(key, 1), self.frame(key, 2)
        check(outcome.status is Status.OK and value in (old, new), "a late put left neither old nor new")
        if any(end is not None and end.status is Status.OK for end in ends):
            check(value == new, "a late put said OK, and the old value is still there")

    def test_the_driver_retries_nothing(self) -> None:
        """The core decides what is repeated: retries inside a driver multiply load and break deadlines."""
        self.bench.require_medium("network", why="there is no server to be asked again")
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("once")
        value = value_of(key, 1, self.bench.fit(16))
        self.put(store, key, value)
        calls: dict[str, Callable[[], Outcome]] = {
            "get": lambda: store.get(key, len(value)).outcome,
            "put": lambda: store.put(key, value),
        }
        reach = Reach(self.bench, place)
        for name, call in calls.items():

            def broken(call: Callable[[], Outcome] = call) -> None:
                with reach.faulty(Fault.RESET, store):
                    call()

            asked = reach.requests_of(store, broken)
            check(asked <= 1, f"one {name} of one value was sent {asked} times")
            store.get(key, len(value))  # takes the broken connection's place

    def test_closing_through_the_core_is_quick_and_final(self) -> None:
        """Shutdown has a deadline of its own; a store that is idle must not use it up."""
        core, key = self.bench.open_core(), key_named("closed")
        core.put(key, self.frame(key, 1))
        self._in_time("closing an idle store", core.close)
        job = core.submit(Operation.STAT, [key])
        check(isinstance(job.outcomes[0].error, BackendClosed), "a call after close was not refused")

    @needs("asynchronous")
    def test_an_asynchronous_call_returns_before_its_items_are_settled(self) -> None:
        """The core gives such a backend one thread for many calls: one that waits in it stops them all."""
        store, key = self.bench.open(), key_named("asynchronous")
        returned = threading.Event()
        after: list[bool] = []
        store.before_settling = lambda: after.append(returned.wait(self.bench.harness.slack_s))
        store.after_method = returned.set
        outcome = store.put(key, value_of(key, 1, PAGE))
        check(outcome.status is Status.OK, f"put: {outcome.status.name} ({outcome.error})")
        check(all(after), "the method returned only after its item was settled")

    @needs("asynchronous")
    def test_close_settles_what_is_under_way(self) -> None:
        """An item that is never settled keeps its memory for ever."""
        store, keys = self.bench.open(), [key_named(f"under way {n}") for n in range(8)]
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(self.bench.harness.slack_s)

        store.before_settling = hold
        with deadline_of(store, self.bench.harness.slack_s):
            running = Running(lambda: store.put_many([(key, value_of(key, 1, PAGE)) for key in keys]))
            held.wait(self.bench.harness.slack_s)
            closing = Running(store.backend.close)
            go_on.set()
            running.ended.wait(self.bench.harness.deadline_s)
        check(closing.ended.wait(self.bench.harness.slack_s), "close went on waiting")
        left = store.calls[-1].unsettled_at_return
        check(not left, f"items {left} were under way at close and were never settled")

    # -- what these properties share -------------------------------------------------------------

    def _late(self, operation: Operation, key: StorageKey) -> tuple[Core, FrameJob]:
        """A job that a stalled store held up past its deadline, once the backend has let go of it."""
        self.bench.require_medium("network", "file", why="nothing behind it can stall")
        harness, place = self.bench.harness, self.bench.place()
        core, beside = self.bench.open_core(place), key_named("beside")
        core.put(key, self.frame(key, 1))
        core.put(beside, self.frame(beside, 1))
        frames = [self.frame(key, 2)] if operation is Operation.PUT else []
        with Reach(self.bench, place).faulty(Fault.STALLED, core):
            for deadline_s in (harness.stalled_deadline_s * 4**n for n in range(_TRIES)):
                job = core.submit(
                    operation,
                    [key],
                    frames=frames,
                    view_nbytes=len(self.frame(key, 1)),
                    deadline_s=deadline_s,
                    keep_memory=True,
                )
                in_time = job.wait_settled(deadline_s + harness.slack_s)
                check(in_time, f"a {operation.value} of a stalled store was not settled at its deadline")
                if job.left_s > deadline_s / 2:  # else it came to the backend too late to be held up there
                    break
            if self.bench.capabilities.medium == "network":  # it gives up by itself: before the answers come
                job.wait_finished(harness.slack_s)
            if job.outcomes[0].status is Status.OK:  # it was taken without the medium, if that is stalled
                core.submit(
                    Operation.GET,
                    [beside],
                    view_nbytes=len(self.frame(beside, 1)),
                    deadline_s=harness.stalled_deadline_s,
                ).wait_settled(harness.stalled_deadline_s + harness.slack_s)
        check(job.wait_finished(harness.deadline_s), f"a late {operation.value} never let go of its memory")
        outcome, _ = core.get(beside, len(self.frame(beside, 1)))
        check(outcome.status is Status.OK, f"another get after the stall: {outcome.status.name}")
        check(not job.faults, "; ".join(job.faults))
        return core, job

    def _many_absent(self) -> list[StorageKey]:
        """So many that a bound for each instead of for all of them is far beyond the stalled deadline."""
        harness = self.bench.harness
        count = 2 + 2 * int(harness.slack_s / harness.stalled_deadline_s)
        most = min(count, _MOST_STALLED, (self.bench.capabilities.max_batch or count + 1) - 1)
        return [key_named(f"behind the stalled one {n}") for n in range(most)]

    def _opens_in_time(self, place: Place) -> None:
        """Opens another of that place while it stalls: in `Host.deadline_s`, however it ends."""
        backend = self.bench.build(place)
        host = self.bench.host(backend)
        host.deadline_s = self.bench.harness.stalled_deadline_s

        def attempt() -> None:
            with suppress(LMCacheError):
                backend.open(host)

        try:
            with self.bench.inside(self.bench.harness.faulty(place.directory, Fault.STALLED)):
                self._in_time("opening a stalled store", attempt)
        finally:
            backend.close()
            host.close()

    def _stalled(self, store: Store, key: StorageKey) -> Running[Got]:
        """A get that waits for a stalled store."""
        return self._held_up(store, lambda: store.get(key, PAGE))

    def _held_up(self, store: Store, call: Callable[[], T]) -> Running[T]:
        """A call that stands still in the backend, and has done so for a while; or it has ended."""
        num_calls, harness = len(store.calls), self.bench.harness
        running, until = Running(call), time.monotonic() + harness.slack_s
        running.wait_until_it_waits(harness.slack_s)
        while not running.ended.wait(_POLL_S) and time.monotonic() < until:
            begun = store.calls[num_calls:]  # none yet, where the machine is so busy
            if begun and begun[0].took_s >= harness.stalled_deadline_s:
                break
        return running

    def _in_time(self, what: str, call: Callable[[], T]) -> T:
        """The result of a call that waits for the stalled deadline at most."""
        return in_time(what, call, self.bench.harness.stalled_deadline_s + self.bench.harness.slack_s)

    def _is_late(self, outcome: Outcome, name: str) -> None:
        check(
            outcome.status is Status.FAILED and isinstance(outcome.error, DeadlineExceeded),
            f"{name} after its deadline ended {outcome.status.name} ({outcome.error!r})",
        )


def _scan(store: Store, call: Call) -> None:
    """A scan as a call of one item, which is OK if the scan gives a page."""
    store.backend.scan(call, "", None, 10)
    call.done(0, Outcome(status=Status.OK))
