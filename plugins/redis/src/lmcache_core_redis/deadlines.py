"""Calls of our own making: for opening, and for a part of another call's time."""

from __future__ import annotations

import time

from lmcache_core.sdk import Call, DeadlineExceeded, Outcome


class Within:
    """A call that ends after `timeout_s`, and with `call` if it is part of one."""

    def __init__(self, timeout_s: float, call: Call | None = None) -> None:
        self._ends = time.monotonic() + timeout_s
        self._call = call

    @property
    def deadline(self) -> float:
        return self._ends if self._call is None else min(self._ends, self._call.deadline)

    @property
    def cancelled(self) -> bool:
        return self._call is not None and self._call.cancelled

    def remaining(self) -> float:
        """
        Raises:
            DeadlineExceeded: the time is over.
        """
        left = self._ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("its time is over")
        return left if self._call is None else min(left, self._call.remaining())

    def done(self, index: int, outcome: Outcome) -> None:
        """There is nothing to settle."""
