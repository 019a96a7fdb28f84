"""What one thread waits for and another tells: an event that Ctrl-C in the waiter can't spoil."""

from __future__ import annotations

import threading


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
