"""One property under watch: bounded in time, stopped when the run is, and shown where its threads stand.

Properties run one at a time in a process, each on a thread of its own that starts more of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn, TypeVar
from weakref import WeakKeyDictionary

from lmcache_core_conformance.verdicts import Violation

T = TypeVar("T")
_PREFIX = "conformance-"
_MOST_THREADS = 12
_MOST_FRAMES = 12
_STOPS_WITHIN_S = 5.0
_POLL_S = 0.1
_before: frozenset[threading.Thread] = frozenset()
"""The threads that were there before the present property began."""
_rounds: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


class Hung(Violation):
    """A property had not ended in its time. Its threads have been told to stop; one that waits goes on."""


class Stopped(BaseException):
    """Raised in the threads of a property that is given up. No Exception: nobody handles it."""


def bounded(work: Callable[[], None], limit_s: float) -> None:
    """Runs `work` on a daemon thread, so that a backend that hangs fails instead of hanging the suite.

    Raises:
        Hung: it had not ended after `limit_s`; the message shows where each of its threads stands.
        Violation: it ended by what is no Exception: sys.exit(), pytest.skip().
        Exception: whatever `work` raised.
        KeyboardInterrupt: this thread was interrupted. What `work` started has been told to stop, and
            was waited for a while.
    """
    global _before
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (handed to the caller below)
            errors.append(error)

    _before = frozenset(threading.enumerate())
    thread = named_thread("property", run)
    try:
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            stands = where_threads_stand()
            _stop_threads()  # those that work, and do not wait, would go on beside the next property
            raise Hung(f"still running after {limit_s:g} s\n{stands}")
    except KeyboardInterrupt:
        _stop_threads()
        thread.join(_STOPS_WITHIN_S)
        raise
    if not errors:
        return
    if isinstance(errors[0], Exception):
        raise errors[0]
    raise Violation(f"{type(errors[0]).__name__} was raised: {errors[0]}") from errors[0]


@contextlib.contextmanager
def not_ended_from_within() -> Iterator[None]:
    """While inside, `os._exit` doesn't end this process, which would look like success to its caller.

    Raises:
        Violation: it was called.
    """
    process, end, codes = os.getpid(), os._exit, list[int]()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a forked child may
            end(status)
        codes.append(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    except Exception:
        if not codes:
            raise
    finally:
        os._exit = end
    if codes:
        raise Violation(f"os._exit({codes[0]}) was called, which ends the process without a word")


def named_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """A daemon thread of the suite, not yet started."""
    return threading.Thread(target=work, name=f"{_PREFIX}{name}", daemon=True)


def join(thread: threading.Thread, timeout_s: float = math.inf) -> None:
    """Waits for `thread` in steps, so that the waiting thread itself can be stopped."""
    until = time.monotonic() + timeout_s
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(left, _POLL_S))


def rounds(of: Collection[T]) -> Iterator[T]:
    """Each of `of`; meanwhile it is known how far this thread has come, should it hang."""
    thread = threading.current_thread()
    for number, one in enumerate(of, 1):
        _rounds[thread] = f"round {number} of {len(of)}"
        yield one
    _rounds.pop(thread, None)


def where_threads_stand() -> str:
    """The stacks of all threads that the present property or the backend has started."""
    frames = sys._current_frames()
    threads = [thread for thread in _new_threads() if thread.ident in frames]
    shown = []
    for thread in threads[:_MOST_THREADS]:
        round_of = f", {_rounds[thread]}" if thread in _rounds else ""
        stack = traceback.format_stack(frames[thread.ident or 0], limit=_MOST_FRAMES)
        shown.append(f"thread {thread.name}{round_of}:\n{''.join(stack)}")
    if len(threads) > _MOST_THREADS:
        shown.append(f"and {len(threads) - _MOST_THREADS} threads more\n")
    return "".join(shown)


def _new_threads() -> list[threading.Thread]:
    """Those of the present property: the suite's own first, each in the order of their beginnings."""
    new = [t for t in threading.enumerate() if t not in _before and t is not threading.current_thread()]
    return sorted(new, key=lambda thread: not thread.name.startswith(_PREFIX))


def _stop_threads() -> None:
    """Raises `Stopped` in the suite's own threads, so that each undoes its work."""
    for own in _new_threads():
        if own.name.startswith(_PREFIX) and own.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(own.ident), ctypes.py_object(Stopped))
