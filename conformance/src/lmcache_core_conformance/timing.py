"""Calls against the clock: with a deadline of their own, on a thread of their own, and in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.verdicts import Violation
from lmcache_core_conformance.watch import named_thread, where_threads_stand

T = TypeVar("T")
_SAMPLE_S = 0.005


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


@contextmanager
def deadline_of(store: Store, deadline_s: float) -> Iterator[None]:
    """While inside, calls of `store` have this deadline."""
    before, store.host.deadline_s = store.host.deadline_s, deadline_s
    try:
        yield
    finally:
        store.host.deadline_s = before
