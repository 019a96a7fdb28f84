"""Retry budget: retries may be a share of all calls, so that a failing store isn't asked twice as much."""

from __future__ import annotations

import threading


class RetryBudget:
    """A token bucket: each call adds `ratio`, up to `most`; a retry takes one. Starts full. Thread-safe."""

    def __init__(self, *, ratio: float = 0.1, most: float = 10.0) -> None:
        self._ratio = ratio
        self._most = most
        self._tokens = most
        self._lock = threading.Lock()  # guards _tokens

    def record_call(self) -> None:
        if self._tokens >= self._most:  # the usual case, without the lock
            return
        with self._lock:
            self._tokens = min(self._most, self._tokens + self._ratio)

    def try_spend(self) -> bool:
        """Whether one retry may be made; a yes is spent."""
        with self._lock:
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True
