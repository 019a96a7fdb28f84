"""Lifecycle: built without I/O, opened, closed, and then nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmcache_core.errors import LMCacheError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage import Operation
from lmcache_core.storage.contract import Backend, BackendStats, Item, Outcome, Status
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.core import Core
from lmcache_core_conformance.driver import Buffer, Store, Want
from lmcache_core_conformance.growth import check_no_growth
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.timing import Caller, Running, deadline_of, in_time
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Violation, check
from lmcache_core_conformance.watch import join

_CALLERS = 3
_SERVED = 2
"""The exit status of a forked child that was not refused."""


class Lifecycle(Group):
    group = "lifecycle"

    def test_building_does_no_io(self) -> None:
        """`config check` and a failed start build backends: no file, descriptor or thread may come of it."""
        place = self.bench.place()
        before = _Leftovers(self.bench, place.directory)
        backend = self.bench.build(place)
        check(backend.capabilities is not None, "capabilities must be known before open")
        try:
            before.check_nothing_new("building the backend")
        finally:
            backend.close()

    def test_open_may_only_narrow_the_capabilities(self) -> None:
        """The core plans with what was declared; what open adds or raises was never planned for."""
        place = self.bench.place()
        declared, opened = self.bench.build(place).capabilities, self.bench.open(place).capabilities
        for name in ("delete", "scan", "ranged", "persistent", "pin"):
            check(getattr(declared, name) or not getattr(opened, name), f"open added capability {name}")
        check(opened.max_in_flight <= declared.max_in_flight, "open raised max_in_flight")
        check(opened.medium == declared.medium, "open changed the medium")
        check(opened.devices <= declared.devices, "open added devices")
        for name in ("max_value_bytes", "max_batch"):
            before, after = getattr(declared, name), getattr(opened, name)
            check(before is None or (after is not None and after <= before), f"open raised {name}")

    def test_close_is_idempotent(self) -> None:
        """Shutdown paths meet: a second close must not raise, nor close what is another's by now."""
        store = self.bench.open()
        key, value = self.some_values(1)[0]
        self.put(store, key, value)
        store.close()
        readable, writable = os.pipe()  # takes the numbers that the backend's descriptors had
        try:
            for _ in range(2):
                _close_quietly(store.backend.close, "closed again")
            os.fstat(readable)
            os.fstat(writable)
        except OSError as error:
            raise Violation("a second close closed a descriptor that belonged to somebody else") from error
        finally:
            for descriptor in (readable, writable):
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def test_close_before_open_is_harmless(self) -> None:
        """When one tier of a chain fails to start, those not opened yet are closed too."""
        backend = self.bench.build(self.bench.place())
        _close_quietly(backend.close, "closed before it was opened")

    def test_stats_are_told_at_any_time(self) -> None:
        """Who watches asks when it likes, from a thread of its own: an error then hides how the tier is."""
        place, (key, value) = self.bench.place(), self.some_values(1)[0]
        backend = self.bench.build(place)
        self._told("before open", lambda: _stats_of(backend))
        store = self.bench.open(place)
        asked: list[Running[object]] = []

        def ask(index: int, outcome: Outcome) -> None:
            asked.append(Running(lambda: _stats_of(store.backend)))
            asked[-1].ended.wait(self.bench.harness.meeting_s)  # else it waits for the call to end

        store.on_settled = ask
        for call in (store.put(key, value), store.get(key, len(value)).outcome, store.stat(key)):
            check(call.status is Status.OK, f"a call during which stats were asked for: {call.status.name}")
        store.on_settled = None
        for running in asked:
            self._told("while a call runs", lambda running=running: _ended(running))  # type: ignore[misc]
        store.close()
        self._told("after close", lambda: _stats_of(store.backend))

    def test_close_after_a_failed_open_leaves_nothing(self) -> None:
        """A store that is down is tried again and again: what each failed open leaks adds up."""
        place = self.bench.place()
        if self.bench.harness.backend_medium(place.directory) == "memory":
            raise NotApplicable("capability medium is memory: there is nothing that open could fail to reach")
        options = self.bench.harness.unopenable_config(place.directory)
        before = _Leftovers(self.bench)
        backend = self.bench.harness.build(options)
        host = self.bench.host(backend)
        try:
            error = _error_of(lambda: backend.open(host))
            check(error is not None, "open succeeded with the options of unopenable_config")
            check(
                isinstance(error, LMCacheError),
                f"open failed with {type(error).__name__}, which is not one of the SDK's errors: {error}",
            )
        finally:
            del error
            _close_quietly(backend.close, "closed after a failed open")
            host.close()
        before.check_nothing_new("a failed open")

    def test_nothing_survives_close(self) -> None:
        """Descriptors, threads and temporary files that outlive a backend end in a full table or disk."""
        place = self.bench.place()
        with (
            contextlib.ExitStack() as stack,
            _own_temporary_directory(self.bench.directory) as temporaries,
        ):
            self.bench.open().close()  # what a driver keeps for the process is there now
            callers = [stack.enter_context(Caller()) for _ in range(_CALLERS)]
            before = _Leftovers(self.bench)
            store = self.bench.open(place)

            def use() -> None:
                for key, value in self.some_values(4):
                    self.put(store, key, value)
                    self.holds(store, key, value)
                    self.put(store, key, value_of(key, 2, len(value)))
                store.get(key_named("absent"), PAGE)

            use()
            for caller in callers:  # which go on after the close, as the engine's own threads do
                caller.run(use)
            store.close()
            before.check_nothing_new("use from several threads and close")
            left = sorted(path.name for path in temporaries.rglob("*"))
            check(not left, f"temporary files are left after close: {left[:5]}")
        if not self.bench.capabilities.persistent and self.bench.capabilities.medium == "file":
            files = [path.name for path in place.directory.rglob("*") if path.is_file()]
            check(not files, f"a store that isn't persistent leaves {len(files)} files: {sorted(files)[:5]}")

    def test_a_call_that_comes_after_close_does_no_harm(self) -> None:
        """One on its way when close comes hangs, opens anew, or writes to who has the descriptor by now."""
        place = self.bench.place()
        store, values = self.bench.open(place), self.some_values(2)
        key, value = values[0]
        self.put(store, key, value)
        held = set(_descriptors())
        store.close()
        with deadline_of(store, self.bench.harness.slack_s), _taken(held - set(_descriptors())):
            before = _Leftovers(self.bench)
            late: dict[str, Callable[[], object]] = {
                "put": lambda: store.put(*values[1]),
                "stat": lambda: store.stat(key),
                "get": lambda: self._late_get(store, key, value),
            }
            if self.bench.capabilities.delete:
                late["delete"] = lambda: store.delete(values[1][0])
            for name, call in late.items():
                in_time(f"a {name} after close", call, 2 * self.bench.harness.slack_s)
                made = store.calls[-1]
                left = made.raised is None and made.unsettled_at_return
                check(not left, f"a {name} after close returned, and its item was never settled")
                error = made.raised or made.outcomes[0].error
                typed = isinstance(error, LMCacheError | None)
                check(typed, f"a {name} after close failed with {error!r}, which is none of the SDK's errors")
            before.check_nothing_new("calls after close")
        if self.bench.capabilities.persistent:
            self.holds(self.bench.open(place), key, value, "a value, after calls that came after close")

    def test_calls_that_end_badly_leave_nothing_behind(self) -> None:
        """Misses are the most frequent answer: a descriptor, thread or note left by each fills a table."""
        bound, offered = self.bench.harness.small_capacity_bytes, self.bench.capabilities
        store, absent = self.bench.open(capacity_bytes=bound), key_named("absent")
        key, value = self.some_values(1, pages=3)[0]
        self.put(store, key, value)
        past = Want(key, (2 * max(offered.range_min, PAGE),), offset=len(value) // PAGE * PAGE)
        quick: list[Callable[[], object]] = [
            lambda: store.get(absent, PAGE),
            lambda: store.get(key, PAGE),
            lambda: store.get_many([past]),  # refused, where ranges aren't offered
            lambda: store.stat(absent),
            lambda: store.put(absent, value) if store.host.deadline_s < 0 else None,
        ]
        if offered.delete:
            quick.append(lambda: store.delete(absent))
        too_large = Buffer([bound + PAGE])
        item = Item(key_named("too large"), too_large.views())

        def all_of_them() -> None:
            for call in quick:
                call()
            if not offered.self_evicting:
                store.call(1, lambda call: store.backend.put_many([item], call))
            with deadline_of(store, -1.0):
                for call in quick:
                    call()
            store.calls.clear()
            store.host.lost_copies.clear()

        check_no_growth(all_of_them, "calls that end badly")

    def test_a_forked_child_is_refused_and_leaves_its_parent_alone(self) -> None:
        """Engines fork workers: a child that uses, or just closes, its parent's connection breaks both."""
        core, keys = self.bench.open_core(), [key_named(f"before the fork {n}") for n in range(2)]
        frames = [self.frame(key, 1) for key in keys]
        for key, frame in zip(keys, frames, strict=True):
            core.put(key, frame)
        child = os.fork()
        if child == 0:
            os._exit(_life_of_a_child(core, keys[0], self.bench.harness.slack_s))
        code = _wait_for_child(child, 4 * self.bench.harness.slack_s)
        check(code != _SERVED, "a forked child was not refused")
        check(code == 0, f"a forked child ended with {code}: it hung, or close raised in it")
        for key, frame in zip(keys, frames, strict=True):
            outcome, value = core.get(key, len(frame))
            whole = outcome.status is Status.OK and value == frame
            check(whole, f"after a fork, the parent's get: {outcome.status.name} ({outcome.error})")
        core.put(keys[0], self.frame(keys[0], 2))

    def test_stores_in_different_places_are_independent(self) -> None:
        """State kept by a class or module leaks one tier's values into another's, and past a close."""
        first, second = self.bench.open(), self.bench.open()
        key, value = self.some_values(1)[0]
        self.put(first, key, value)
        check(second.stat(key).status is Status.MISS, "a value put in one store is in another one, too")
        if self.bench.capabilities.scan:
            check(not second.scan(), "a value put in one store is listed by another one, too")
        if self.bench.capabilities.delete:
            status = second.delete(key).status
            check(status is Status.MISS, f"delete of a value of another store: {status.name}, due is MISS")
        self.holds(first, key, value, "a value that another store was asked for, too")
        first.close()
        self.put(second, key, value)
        self.holds(second, key, value, "a value put after another store of the same kind was closed")

    def _told(self, when: str, ask: Callable[[], object]) -> None:
        """Checks that stats, asked for on another thread, are told."""
        seen = in_time(f"stats {when}", ask, self.bench.harness.slack_s)
        check(isinstance(seen, BackendStats), f"stats {when} gave {seen!r}")

    def _late_get(self, store: Store, key: StorageKey, value: bytes) -> None:
        got = store.get(key, len(value))
        if got.status is Status.OK:
            self.check_value(got, value, "a value after close")


class _Leftovers:
    """What the process holds at one moment: descriptors, threads, and files of one directory."""

    def __init__(self, bench: Bench, directory: Path | None = None) -> None:
        self._threads_end_s = bench.harness.threads_end_s
        self._directory = directory
        self._descriptors = _descriptors()
        self._threads = set(threading.enumerate())
        self._files = self._list_files()

    def check_nothing_new(self, what: str) -> None:
        """
        Raises:
            Violation: something is there that was not when this was made. Threads are given a while to
                end, since `close` doesn't wait for them.
        """
        until = time.monotonic() + self._threads_end_s
        for thread in set(threading.enumerate()) - self._threads:
            while thread in threading.enumerate() and time.monotonic() < until:  # it may be starting yet
                join(thread, until - time.monotonic())
            check(thread not in threading.enumerate(), f"{what} leaves the thread {thread.name!r}")
        new = {
            number: target
            for number, target in _descriptors().items()
            if self._descriptors.get(number) != target
        }
        check(not new, f"{what} leaves open descriptors: {sorted(new.values())[:5]}")
        files = self._list_files() - self._files
        check(not files, f"{what} leaves files: {sorted(files)[:5]}")

    def _list_files(self) -> set[str]:
        return set() if self._directory is None else {str(path) for path in self._directory.rglob("*")}


def _life_of_a_child(core: Core, key: StorageKey, patience_s: float) -> int:
    """What a forked child does before it ends: its exit status."""
    try:
        job = core.submit(Operation.GET, [key], view_nbytes=4 * PAGE)
        refused = job.wait_settled(patience_s) and job.outcomes[0].status is Status.FAILED
        core.backend.close()
    except BaseException:  # noqa: BLE001 (told to the parent by the status)
        return 1
    return 0 if refused else _SERVED


def _wait_for_child(child: int, timeout_s: float) -> int:
    """The child's exit status; it is killed when it takes longer."""
    until, pause = time.monotonic() + timeout_s, threading.Event()
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        pause.wait(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _close_all(numbers: set[int]) -> None:
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)


@contextlib.contextmanager
def _taken(numbers: set[int]) -> Iterator[None]:
    """While inside, these free descriptor numbers are those of a file of somebody else's.

    Raises:
        Violation: it was written to, cut, or closed.
    """
    content = value_of(key_named("somebody else's"), 1, 16 * PAGE)
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
        file.write(content)
        file.seek(0)
        stack.callback(_close_all, numbers - {file.fileno()})
        for number in numbers - {file.fileno()}:
            os.dup2(file.fileno(), number)
        yield
        for number in (file.fileno(), *numbers):
            try:
                seen = os.pread(number, len(content) + 1, 0)
            except OSError as error:
                raise Violation("a call after close closed a descriptor that is somebody else's") from error
            check(seen == content, "a call after close wrote into a file that is somebody else's")


def _stats_of(backend: Backend[Any]) -> object:
    """What it tells, or the error that it raises."""
    try:
        return backend.stats()
    except Exception as error:  # noqa: BLE001 (recorded boundary: the backend is foreign code)
        return error.with_traceback(None)


def _ended(running: Running[object]) -> object:
    running.ended.wait()
    return running.result()


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (recorded boundary: the backend is foreign code)
        return error.with_traceback(None)
    return None


def _close_quietly(close: Callable[[], None], what: str) -> None:
    error = _error_of(close)
    check(error is None, f"close raised {type(error).__name__} when {what}: {error}")


@contextlib.contextmanager
def _own_temporary_directory(parent: Path) -> Iterator[Path]:
    directory, before = parent / "tempfile", tempfile.tempdir
    directory.mkdir()
    tempfile.tempdir = str(directory)
    try:
        yield directory
    finally:
        tempfile.tempdir = before
