"""Schedule points: a broken backend waits where it is vulnerable until another thread has come past."""

from __future__ import annotations

import threading


class Rendezvous:
    """Makes a race happen instead of hoping for it. Costs nothing while one thread only calls."""

    def __init__(self, patience_s: float = 1.0) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards all below
        self._callers: set[int] = set()
        self._passes: dict[str, int] = {}

    def passed(self, point: str) -> None:
        """Says that this thread came past `point`."""
        with self._changed:
            self._callers.add(threading.get_ident())
            self._passes[point] = self._passes.get(point, 0) + 1
            self._changed.notify_all()

    def wait_for(self, point: str, passes: int = 1) -> None:
        """Waits, within reason, until other threads have come past `point` so many times."""
        with self._changed:
            self._callers.add(threading.get_ident())
            if len(self._callers) > 1:
                due = self._passes.get(point, 0) + passes
                self._changed.wait_for(lambda: self._passes.get(point, 0) >= due, self._patience_s)
