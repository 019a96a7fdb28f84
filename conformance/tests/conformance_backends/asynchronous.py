"""A correct natively asynchronous backend: a completion thread settles what the methods only hand over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

from conformance_backends.memory import MemoryBackend, MemoryConfig
from lmcache_core.errors import BackendClosed, BackendError
from lmcache_core.storage.contract import Call, Capabilities, Host, Outcome, Status

T = TypeVar("T")


class AsynchronousBackend(MemoryBackend):
    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.closed = False
        self.accepting = threading.Lock()  # guards closed: nothing is handed over after the end mark

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, asynchronous=True)

    def open(self, host: Host) -> Capabilities | None:
        threading.Thread(target=self.complete, daemon=True, name="completion").start()
        return super().open(host)

    def complete(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # it refers to views

    def close(self) -> None:
        with self.accepting:
            if not self.closed:
                self.closed = True
                self.work.put(None)
        super().close()

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        with self.accepting:
            if self.closed:
                raise BackendClosed("closed")
            for index, thing in enumerate(things):
                self.hand_over(index, thing, call, one)

    def hand_over(self, index: int, thing: T, call: Call, one: Callable[[T], Outcome]) -> None:
        self.work.put(lambda: self.settle(index, thing, call, one))

    def settle(self, index: int, thing: T, call: Call, one: Callable[[T], Outcome]) -> None:
        """On the completion thread, which survives whatever happens here."""
        try:
            call.remaining()
            outcome = one(thing)
        except BackendError as error:
            outcome = Outcome(status=Status.FAILED, error=error.with_traceback(None))
        call.done(index, outcome)


class LastFirst(AsynchronousBackend):
    """Right, and odd: works through each batch from its end."""

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        with self.accepting:
            if self.closed:
                raise BackendClosed("closed")
            for index, thing in reversed(list(enumerate(things))):
                self.hand_over(index, thing, call, one)
