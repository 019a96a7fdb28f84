"""The numbered stream of what comes to a tier and what leaves it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping

from lmcache_core.events import ChunkAdmitted, ChunkEvicted, Event, EventBus
from lmcache_core.identity.keys import StorageKey

_AT_ONCE = (False,)  # what `Lock.acquire` takes for "don't block"


class ResidencyStream:
    """Numbers admissions and evictions from 1 and delivers them in that order, to those who watch.

    A number that is missing, or comes twice, says that Ctrl-C came in the middle: what is held is to be
    asked for anew.

    `admitted` and `evicted` are called with the index's lock held, and only queue; `flush` is called
    without it, and delivers: one thread drains for all, none waits.
    """

    def __init__(self, tier: str, events: EventBus) -> None:
        self.sequence = 0
        self._tier = tier
        self._events = events
        self._evicted: Counter[str] = Counter()
        self._outbox: deque[Event] = deque()
        self._emitting = threading.Lock()

    @property
    def evictions(self) -> Mapping[str, int]:
        """How many left since the start, by reason."""
        return dict(self._evicted)

    def admitted(self, key: StorageKey, nbytes: int) -> None:
        self.sequence += 1
        if self._events.watched(ChunkAdmitted):
            self._outbox.append(
                ChunkAdmitted(tier=self._tier, key=key, nbytes=nbytes, sequence=self.sequence)
            )

    def evicted(self, key: StorageKey, nbytes: int, reason: str) -> None:
        self.sequence += 1
        self._evicted[reason] += 1
        if self._events.watched(ChunkEvicted):
            self._outbox.append(
                ChunkEvicted(tier=self._tier, key=key, nbytes=nbytes, sequence=self.sequence, reason=reason)
            )

    def skip(self) -> None:
        """A change may have gone untold."""
        self.sequence += 1

    def flush(self) -> None:
        while self._outbox:
            taken: list[bool] = []
            try:
                taken.extend(map(self._emitting.acquire, _AT_ONCE))  # one step, for Ctrl-C too
                if not taken[0]:
                    return
                while self._outbox:
                    self._events.emit(self._outbox[0])
                    self._outbox.popleft()
            finally:
                if taken and taken[0]:
                    self._emitting.release()
