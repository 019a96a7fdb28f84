"""One flight a key: concurrent loads of a frame share one read.

Flights start and land on threads of ours, where no Ctrl-C comes; a caller only has tickets.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.signal import Signal
from lmcache_core.tiers.frames import Frame


class Releasable(Protocol):
    def release(self) -> None: ...


R = TypeVar("R", bound=Releasable)


class Ticket(Generic[R]):
    """One waiter's claim on a frame, or a piece of one, that is being loaded."""

    __slots__ = ("_arrived", "_frame", "_lock", "_over", "key", "reason")

    def __init__(self, key: StorageKey) -> None:
        self.key = key
        self.reason = ""  # why there is no frame, once there is none
        self._arrived = Signal()
        self._lock = threading.Lock()  # guards _frame and _over: a frame goes to exactly one side
        self._frame: R | None = None
        self._over = False

    @property
    def settled(self) -> bool:
        return self._arrived.is_set

    def deliver(self, frame: R | None, reason: str = "") -> None:
        """Ends the wait. Takes over `frame`, releasing it when nobody waits any more."""
        with self._lock:
            if not self._over:
                self._frame, frame = frame, None
                self.reason = reason
        if frame is not None:
            frame.release()
        self._arrived.set()

    def result(self, timeout_s: float) -> R | None:
        """The frame, the caller's to release, or None when it didn't come in time. Ends the claim."""
        arrived = self._arrived.wait(timeout_s)
        with self._lock:
            self._over = True
            frame, self._frame = self._frame, None
            if not arrived:
                self.reason = "deadline"
        return frame

    def abandon(self) -> None:
        """Gives up the claim, and the frame if it has come."""
        with self._lock:
            self._over = True
            frame, self._frame = self._frame, None
        if frame is not None:
            frame.release()


class Flights:
    """The loads under way, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[StorageKey, list[Ticket[Frame]]] = {}

    def join(self, tickets: Sequence[Ticket[Frame]]) -> list[StorageKey]:
        """Has `tickets` wait for their keys. Those that nobody loads yet: the caller now must `land` each."""
        mine = []
        with self._lock:
            for ticket in tickets:
                waiting = self._waiting.get(ticket.key)
                if waiting is None:
                    self._waiting[ticket.key] = [ticket]
                    mine.append(ticket.key)
                else:
                    waiting.append(ticket)
        return mine

    def land(self, key: StorageKey, frame: Frame | None, reason: str = "") -> None:
        """Ends the flight of `key`, giving every waiter a share of `frame`, which stays the caller's."""
        with self._lock:
            tickets = self._waiting.pop(key, [])
        for ticket in tickets:
            ticket.deliver(frame.share("load") if frame is not None else None, reason)

    @property
    def num_waiting(self) -> int:
        """Tickets whose flight has not landed."""
        with self._lock:
            return sum(map(len, self._waiting.values()))
