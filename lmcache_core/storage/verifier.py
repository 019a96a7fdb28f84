"""The verifier: one thread that checks frames as they arrive, while the next ones are still being read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from lmcache_core.storage.faults import is_interrupt

log = logging.getLogger(__name__)


class Verifier:
    """Runs checks in order on one daemon thread, started with the first. Shared by all tiers.

    Never loses a check: one that can't be handed to the thread, after `close` or because no thread
    starts, runs on the thread that submits it. What a check raises is logged.
    """

    def __init__(self) -> None:
        self._checks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two below, and that nothing is queued after the end mark
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, check: Callable[[], None]) -> None:
        with self._lock:
            queued = not self._closed and self._has_thread()
            if queued:
                self._checks.put(check)
        if not queued:
            _run(check)

    def close(self) -> None:
        """Ends the thread once it has run what was submitted. Doesn't wait; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._checks.put(None)

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="lmcache-verifier", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system refuses more threads, or the interpreter is ending
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while (check := self._checks.get()) is not None:
            _run(check)
            del check  # keeps the frame's memory alive otherwise, until the next one comes


def _run(check: Callable[[], None]) -> None:
    try:
        check()
    except BaseException as error:  # recorded boundary: the thread outlives any check
        if is_interrupt(error):
            raise
        log.exception("a check raised")
