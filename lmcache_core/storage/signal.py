"""What one thread waits for and another tells, in ways that Ctrl-C in the waiter can't spoil."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Signal:
    """Set once or more, by any thread; waited for by one.

    `threading.Event` keeps a lock of its own for ever where Ctrl-C comes at the wrong moment of a `wait`,
    and then `set` blocks a thread of ours. Here both are one step of C.
    """

    __slots__ = ("_is_set", "_wakes")

    def __init__(self) -> None:
        self._is_set = False
        self._wakes = threading.Lock()
        self._wakes.acquire()

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        try:
            self._wakes.release()
        except RuntimeError:  # set before, and nobody has waited since
            return

    def wait(self, timeout_s: float) -> bool:
        """Whether it was set within `timeout_s`."""
        if not self._is_set:
            self._wakes.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        return self._is_set


class Watched:
    """A state that `lock` guards, and those who wait for it to change: a condition, but for Ctrl-C."""

    def __init__(self, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._lock = lock
        self._clock = clock
        self._waiting: list[Signal] = []

    def changed(self) -> None:
        """Has those that wait look again. With the lock held."""
        for signal in self._waiting:
            signal.set()
        self._waiting.clear()

    def wait_for(self, is_so: Callable[[], bool], deadline: float) -> bool:
        """Whether `is_so`, called with the lock held, came true by `deadline`. Without the lock."""
        while True:
            signal = Signal()
            with self._lock:
                if is_so():
                    return True
                self._waiting.append(signal)
            left = deadline - self._clock()
            if left <= 0 or not signal.wait(left):
                return self._last_look(is_so, signal)

    def _last_look(self, is_so: Callable[[], bool], signal: Signal) -> bool:
        with self._lock:
            if signal in self._waiting:
                self._waiting.remove(signal)
            return is_so()
