"""One daemon thread that runs functions in order."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from lmcache_core.storage.faults import is_interrupt
from lmcache_core.storage.threads import start_thread

log = logging.getLogger(__name__)


class SerialThread:
    """Runs what is submitted, in order, on a thread that is started with the first.

    Never loses a function: one that can't be handed to the thread, after `close`, in a forked child, or
    because no thread starts, runs on the thread that submits it. What it raises is logged.

    Ctrl-C never comes to this thread. So what must not be cut short is done here; a caller that is
    interrupted in `submit` has handed it over, or has not.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two below, and that nothing is queued after the end mark
        self._running = False  # the thread is there
        self._closed = False

    def submit(self, function: Callable[[], None]) -> None:
        queued = False
        if os.getpid() == self._pid:  # a forked child has no such thread, and the lock may be held for ever
            with self._lock:
                queued = not self._closed and self._has_thread()
                if queued:
                    self._functions.put(function)
        if not queued:
            _run(function)

    def close(self) -> None:
        """Ends the thread once it has run what was submitted. Doesn't wait; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._functions.put(None)

    def _has_thread(self) -> bool:
        if not self._running:
            self._running = start_thread(self._work, self._name).is_alive()
        return self._running

    def _work(self) -> None:
        self._running = True  # also where Ctrl-C came before `_has_thread` could say so
        while (function := self._functions.get()) is not None:
            _run(function)
            del function  # keeps memory alive otherwise, until the next one comes


def _run(function: Callable[[], None]) -> None:
    try:
        function()
    except BaseException as error:  # recorded boundary: the thread outlives any function
        if is_interrupt(error):
            raise
        log.exception("a function on a thread of the cache's raised")
