"""The alarm: a thread that calls back when the earliest of many deadlines has passed."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 3600.0


class Alarm:
    """Calls `ring` on a daemon thread once the clock reaches the earliest deadline it was told of.

    It forgets that deadline then: `ring` looks at what is due and tells the next one with `at`.
    Deadlines that are no longer of interest aren't taken back; they cost one needless ring.
    """

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._changed = threading.Condition()  # guards the two below
        self._next_at = math.inf
        self._stopped = False

    def start(self, name: str) -> None:
        threading.Thread(target=self._wait, name=name, daemon=True).start()

    def at(self, deadline: float) -> None:
        """Rings at `deadline` at the latest. Call it after the deadline can be seen by `ring`."""
        if deadline >= self._next_at:  # unlocked: a value that is just being forgotten means that it rings
            return
        with self._changed:
            if deadline < self._next_at:
                self._next_at = deadline
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _wait(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                left = self._next_at - self._clock()
                if left > 0:
                    self._changed.wait(min(left, LONGEST_WAIT_S))
                    continue
                self._next_at = math.inf
            try:
                self._ring()
            except BaseException:  # recorded boundary: without this thread no deadline would be kept
                log.exception("a deadline could not be dealt with")
