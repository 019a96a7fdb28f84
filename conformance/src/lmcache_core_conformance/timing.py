"""Calls against the clock: with a deadline of their own, on a thread of their own, and in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import Violation
from lmcache_core_conformance.watch import named_thread, where_threads_stand

T = TypeVar("T")
_SAMPLE_S = 0.005
_FAST_S = 0.005
"""A call that takes no longer is repeated as often as the harness says."""
_TRIES = 3
_SHARE = 0.4
"""What part of a property's time its repetitions may take by their estimate."""


class Running(Generic[T]):
    """A call on a daemon thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.ended = threading.Event()
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread = named_thread("call", partial(self._run, call))
        self._thread.start()

    def wait_until_it_waits(self, timeout_s: float) -> None:
        """Returns once the call has ended, or stands still inside whatever it waits for."""
        until, before = time.monotonic() + timeout_s, None
        while time.monotonic() < until and not self.ended.wait(_SAMPLE_S):
            frame = sys._current_frames().get(self._thread.ident or 0)
            now = None if frame is None else (id(frame), frame.f_lasti)
            if now is not None and now == before:
                return
            before = now

    def result(self) -> T:
        """What the ended call returned.

        Raises:
            BaseException: what it raised.
        """
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._results.append(call())
        except BaseException as error:  # noqa: BLE001 (handed to `result`)
            self._errors.append(error)
        finally:
            self.ended.set()


class Caller:
    """A daemon thread that stays: it makes one call after another, until the context is left."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]] | None]
        self._calls = SimpleQueue()

    def __enter__(self) -> Self:
        named_thread("caller", self._serve).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)

    def run(self, call: Callable[[], None]) -> None:
        """Makes one call on that thread, and returns when it has ended.

        Raises:
            BaseException: what it raised.
        """
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._calls.put((call, ended))
        error = ended.get()
        if error is not None:
            raise error

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, ended = asked
            try:
                call()
            except BaseException as error:  # noqa: BLE001 (handed to `run`)
                ended.put(error)
            else:
                ended.put(None)


def in_time(what: str, call: Callable[[], T], limit_s: float) -> T:
    """The result of `call`.

    Raises:
        Violation: it had not ended after `limit_s`, and goes on in the background; the message shows where.
        BaseException: what it raised.
    """
    running = Running(call)
    if not running.ended.wait(limit_s):
        raise Violation(f"{what} took more than {limit_s:.1f} s\n{where_threads_stand()}")
    return running.result()


def affordable(bench: Bench, rounds: int, calls: int) -> int:
    """`rounds` rounds of `calls` calls each, or as many as a slow store gets through in a property's time.

    A store that is slow, and not hung, is tried less hard. One is enough to say that it is fast, so that a
    busy machine doesn't change what a fast store is put through.
    """
    store, key, took = bench.open(), key_named("timed"), float("inf")
    for _ in range(_TRIES):
        before = len(store.calls)
        store.put(key, value_of(key, 1, PAGE))
        store.get(key, PAGE)
        took = min(took, max(call.took_s for call in store.calls[before:]))
        if took < _FAST_S:
            break
    store.close()
    most = rounds if took < _FAST_S else int(_SHARE * bench.harness.limit_s / (calls * took))
    return max(min(rounds, most), 1)


@contextmanager
def deadline_of(store: Store, deadline_s: float) -> Iterator[None]:
    """While inside, calls of `store` have this deadline."""
    before, store.host.deadline_s = store.host.deadline_s, deadline_s
    try:
        yield
    finally:
        store.host.deadline_s = before
