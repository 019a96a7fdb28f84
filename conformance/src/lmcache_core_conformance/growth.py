"""What the process holds, and whether it grows with the number of calls made."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable

from lmcache_core_conformance.values import PAGE
from lmcache_core_conformance.verdicts import check

_WINDOWS = 6
"""The first fills what is filled once; each of the others has to grow for a leak."""
_ROUNDS = 32
"""Rounds of the first two windows; each of the others has twice as many as the one before."""
_ROUNDS_OF_LIVES = 8
"""The same, where a round opens and closes a store."""
_A_LIFE_NBYTES = 2 * PAGE
"""What a store that was closed may leave: half of it is a page, and far more than notes of its end take."""
_TRIES = 3
"""For lives: who meets whom on a busy machine makes memory grow, too, but a leak is there each time."""
_CLEAN_WINDOWS = 2
"""One could be luck: what something else gives back meanwhile hides a leak."""
_ROUNDS_A_HANDLE = 32
"""A descriptor or thread left once in so many rounds is a leak."""
_THREADS_END_S = 2.0
_PAUSE_S = 0.02


def handles() -> dict[str, int]:
    """How many descriptors and threads the process has."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def more_handles(before: dict[str, int], most: int, timeout_s: float) -> dict[str, int]:
    """How many more there are, as soon as it is less than `most` of each: who ends may take a while."""
    until, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        more = {name: count - before[name] for name, count in handles().items()}
        if max(more.values()) < most or time.monotonic() > until:
            return more
        pause.wait(_PAUSE_S)


def check_no_growth(work: Callable[[], None], what: str, *, nbytes: int | None = None) -> None:
    """Repeats `work` in windows that grow, until two of them left nothing behind.

    A pool, cache or log of bounded length fills, and then is no larger: what goes on growing as the calls do
    is a leak. `nbytes` is what one round stores: half of it kept each time is one, too.

    Raises:
        Violation: `work` leaves more and more behind: a block of memory each time, or half of what it
            stores, or now and then a descriptor or thread.
    """
    left = _left_behind(work, what, _ROUNDS, lambda: _held(with_bytes=nbytes is not None), nbytes)
    check(not left, left)


def check_no_growth_of_lives(life: Callable[[], None], what: str) -> None:
    """As `check_no_growth`, for work that opens and closes a store: judged by the memory that it keeps.

    Threads may end a while after `close`, and what one opening leaves open is another property's to say.

    Raises:
        Violation: each round leaves a page or more behind.
    """
    left = ""
    for _ in range(_TRIES):
        left = _left_behind(life, what, _ROUNDS_OF_LIVES, _held_by_nobody_any_more, _A_LIFE_NBYTES)
        if not left:
            return
    check(False, left)


def _left_behind(
    work: Callable[[], None],
    what: str,
    rounds: int,
    held: Callable[[], dict[str, int]],
    nbytes: int | None,
) -> str:
    """What the calls of `work` leave behind, the more of them the more, in words; empty if nothing."""
    grown: dict[str, int] = {}
    clean = 0
    _let_threads_end()
    gc.freeze()  # what was there before is not looked through: each collection is quick
    try:
        for window in range(_WINDOWS):
            before = held()
            for _ in range(rounds):
                work()
            after = held()
            if window:
                least = _least_of_a_leak(rounds, nbytes)
                growth = {name: after[name] - before[name] for name in grown or before}
                grown = {name: count for name, count in growth.items() if count >= least[name]}
                clean += not grown
                if clean == _CLEAN_WINDOWS:
                    return ""
                rounds *= 2
    finally:
        gc.unfreeze()
    if not grown:
        return ""
    left = " and ".join(f"{count} {name}" for name, count in grown.items())
    return f"{rounds // 2} rounds of {what} leave {left}, and fewer rounds left fewer"


def _least_of_a_leak(rounds: int, nbytes: int | None) -> dict[str, int]:
    handle = max(rounds // _ROUNDS_A_HANDLE, 1)
    return {
        "descriptors": handle,
        "threads": handle,
        "blocks of memory": rounds,
        "bytes": rounds * (nbytes or 0) // 2,
        "bytes allocated": rounds * (nbytes or 0) // 2,
    }


def _let_threads_end() -> None:
    """Until no thread has ended for a while: what those of an earlier property give back hides a leak."""
    pause, until = threading.Event(), time.monotonic() + _THREADS_END_S
    before = handles()["threads"]
    while time.monotonic() < until:
        pause.wait(_PAUSE_S)
        now = handles()["threads"]
        if now >= before:
            return
        before = now


def _held(*, with_bytes: bool) -> dict[str, int]:
    gc.collect()
    found = handles() | {"blocks of memory": sys.getallocatedblocks()}
    if with_bytes:
        _give_free_memory_back()
        found["bytes"] = _resident_bytes()
    return found


def _held_by_nobody_any_more() -> dict[str, int]:
    """The memory that is left once the threads of closed stores have ended."""
    _let_threads_end()
    gc.collect()
    _give_free_memory_back()
    return {"bytes": _resident_bytes(), "bytes allocated": _allocated_bytes()}


def _give_free_memory_back() -> None:
    """Without it, memory freed earlier hides what is kept now. Nothing, where the C library is not glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """What of the process lies in memory: counted page by page, as /proc/self/statm is not."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("mapped_bytes", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("used_bytes", ctypes.c_size_t),
        ("free_bytes", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def _allocated_bytes() -> int:
    """What is in use of the C library's heap: RSS misses what lies where memory was before.

    0 where the C library doesn't tell: it is not glibc, or older than 2.33.
    """
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _MallocInfo
    info = ask()
    return int(info.used_bytes + info.mapped_bytes)
