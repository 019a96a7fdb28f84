"""Preemption at chosen lines: holds one thread up inside the backend while others go on.

The interpreter switches threads rarely, and a window of two lines is met once in a million calls.
`interrupt` stops one call at one line and runs another in between: tried for every line, no such window
is left out. `Preemption` stops the threads of a longer race at pseudo-random lines.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lmcache_core_conformance.verdicts import Violation
from lmcache_core_conformance.watch import join, named_thread, where_threads_stand

_OWN = "lmcache_core_conformance"
_NEVER_IN = ("threading", "contextlib", "random", "logging")
_MOST_LINES_BETWEEN = 60
_PATIENCE_S = 0.004  # the others may all wait for a lock that the stopped thread holds
_MOST_PATIENCE_S = 1.0
_LONGEST_STOP_S = 30.0
_POLL_S = 0.1


def interrupt(
    first: Callable[[], None], line: int, second: Callable[[], None], limit_s: float = _LONGEST_STOP_S
) -> int:
    """Runs `first`, but at the `line`-th line of foreign code that it comes to, runs `second` meanwhile.

    Returns how many such lines `first` has in all; a `line` that is none of them interrupts nothing. When
    `second` waits for something that `first` holds, both go on together.

    Raises:
        BaseException: what either of them raised.
        Violation: they had not both ended after `limit_s`.
    """
    reached, go_on, count = threading.Event(), threading.Event(), 0

    def at_line() -> None:
        nonlocal count
        count += 1
        if count == line:
            reached.set()
            go_on.wait(_LONGEST_STOP_S)

    def run_first() -> None:
        try:
            with _traced(at_line):
                first()
        finally:
            reached.set()

    errors: list[BaseException] = []
    threads = [_thread("first", run_first, errors), _thread("second", second, errors)]
    threads[0].start()
    while not reached.wait(_POLL_S):
        pass  # in steps, so that this thread can be stopped
    threads[1].start()
    _let_run(threads[1])
    go_on.set()
    until = time.monotonic() + limit_s
    for thread in threads:
        join(thread, until - time.monotonic())
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise Violation(
            f"two calls wait for each other: neither had ended after {limit_s:.0f} s\n{where_threads_stand()}"
        )
    return count


def _let_run(thread: threading.Thread) -> None:
    """Returns when `thread` has ended, or sleeps at the same place twice: it waits for what is held.

    A fixed patience won't do: on a busy machine, who could go on may get no turn for longer.
    """
    until, before = time.monotonic() + _MOST_PATIENCE_S, None
    while time.monotonic() < until:
        thread.join(_PATIENCE_S / 2)
        place = _asleep_at(thread)
        if not thread.is_alive() or (place is not None and place == before):
            return
        before = place


def _asleep_at(thread: threading.Thread) -> tuple[int, int] | None:
    """Where in the code a thread sleeps; None for one that runs, or would if it got a processor."""
    frame = sys._current_frames().get(thread.ident or 0)
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:  # it has ended, or not begun
        return None
    asleep = stat.rpartition(")")[2].split()[0] == "S"
    return (id(frame), frame.f_lasti) if asleep and frame is not None else None


def at_every_line(call: Callable[[], None], look: Callable[[], None]) -> None:
    """Runs `call`, and `look` before each line of foreign code that it comes to on this thread.

    Raises:
        BaseException: what either of them raised.
    """
    raised: list[BaseException] = []

    def at_line() -> None:
        try:
            if not raised:
                look()
        except BaseException as error:  # noqa: BLE001 (raised below: the backend must not swallow it)
            raised.append(error)

    with _traced(at_line):
        call()
    if raised:
        raise raised[0]


class Preemption:
    """Shared by the threads of one race. Each enters `thread`, and calls `completed` after each call."""

    def __init__(self, num_threads: int, seed: int) -> None:
        self._changed = threading.Condition()  # guards the three counts
        self._running = num_threads
        self._stopped = 0
        self._completed = 0
        self._seed = seed

    @contextlib.contextmanager
    def thread(self, number: int) -> Iterator[None]:
        """While inside, this thread stops now and then in foreign code."""
        choices = random.Random(self._seed * 1000 + number)  # noqa: S311 (a schedule, not a secret)
        left = choices.randint(1, _MOST_LINES_BETWEEN)

        def at_line() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                left = choices.randint(1, _MOST_LINES_BETWEEN)
                self._stop()

        try:
            with _traced(at_line):
                yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def completed(self) -> None:
        """A call has ended: whoever stopped for it goes on."""
        with self._changed:
            self._completed += 1
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            if self._stopped + 1 >= self._running:
                return  # somebody has to go on
            self._stopped += 1
            due = self._completed + 1
            self._changed.wait_for(lambda: self._completed >= due or self._running < 2, _PATIENCE_S)
            self._stopped -= 1


@contextlib.contextmanager
def _traced(at_line: Callable[[], None]) -> Iterator[None]:
    """While inside, `at_line` runs before each line of the backend's code on this thread."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:  # the interpreter's own signature
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OWN) or module in _NEVER_IN:
            return None
        if event == "line":
            at_line()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _thread(name: str, work: Callable[[], None], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (handed to the caller)
            errors.append(error)

    return named_thread(name, run)
