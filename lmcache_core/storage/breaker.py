"""Circuit breaker: leaves a failing store alone for a while, then lets one real operation try it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    """Calls go through."""
    OPEN = "open"
    """The store failed; calls are refused until the cool-down ends."""
    HALF_OPEN = "half-open"
    """The cool-down ended; one call at a time may try."""


class Breaker:
    """Opens after `failures` failed calls in a row, for `cool_down_s`; then one call decides. Thread-safe.

    A trying call that never reports doesn't wedge it: after another cool-down the next one may try.
    """

    def __init__(
        self, *, failures: int, cool_down_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = failures
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._lock = threading.Lock()  # guards the three below
        self._state = BreakerState.CLOSED
        self._failed_in_a_row = 0
        self._next_try_at = 0.0
        self._on_change: Callable[[BreakerState, str], None] = lambda state, reason: None

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def refusing(self) -> bool:
        """Whether `allow` would say no. Claims nothing."""
        return self._state is not BreakerState.CLOSED and self._clock() < self._next_try_at

    def watch(self, on_change: Callable[[BreakerState, str], None]) -> None:
        """Calls `on_change(state, reason)` at every change from now on, without any lock held."""
        self._on_change = on_change

    def allow(self) -> bool:
        """Whether a call may go through. A yes in half-open is a claim: report success or failure."""
        if not self._failed_in_a_row:  # so it is closed; the usual case, without the lock
            return True
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            now = self._clock()
            if now < self._next_try_at:
                return False
            self._next_try_at = now + self._cool_down_s
            changed = self._state is not BreakerState.HALF_OPEN
            self._state = BreakerState.HALF_OPEN
        if changed:
            self._on_change(BreakerState.HALF_OPEN, "one call tries the store")
        return True

    def success(self) -> None:
        """A call came through. In the open state ignored: it began before the store failed."""
        if not self._failed_in_a_row:  # so it is closed; the usual case, without the lock
            return
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            self._failed_in_a_row = 0
            changed = self._state is not BreakerState.CLOSED
            self._state = BreakerState.CLOSED
        if changed:
            self._on_change(BreakerState.CLOSED, "the store answers again")

    def failure(self, reason: str) -> None:
        """A call failed. In the open state ignored: stragglers don't prolong the cool-down."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            self._failed_in_a_row += 1
            if self._state is BreakerState.CLOSED and self._failed_in_a_row < self._threshold:
                return
            self._state = BreakerState.OPEN
            self._next_try_at = self._clock() + self._cool_down_s
        self._on_change(BreakerState.OPEN, reason)
