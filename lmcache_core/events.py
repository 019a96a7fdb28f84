"""What the cache tells whoever watches: typed events, observers, and the bus between them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. Events carry no tensor, no token and no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAdmitted(Event):
    """A tier holds this key from now on. `sequence` numbers one tier's admit / evict stream from 1."""

    tier: str
    key: str
    nbytes: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEvicted(Event):
    """A tier no longer holds this key. `reason`: capacity, cleared, lost, corrupt, replaced, moved."""

    tier: str
    key: str
    nbytes: int
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRejected(Event):
    """Bytes read from a tier failed verification; they were served to nobody."""

    tier: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerChanged(Event):
    """A tier's read or write breaker moved to `state`: closed, open or half-open."""

    tier: str
    operation: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDown(Event):
    """A tier can't be used by this process for now; the chain runs on without it."""

    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUp(Event):
    """A tier is in use: opened, or healed after TierDown."""

    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFailed(Event):
    """One item of an operation (`get`, `put`, `stat`, `delete`) failed or timed out in a tier."""

    tier: str
    operation: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShed(Event):
    """A chunk was not written to a tier.

    `reason`: tier down, queue full, evicted, no room, no memory, deadline, full, failed, cleared, closing.
    `detail` says more where there is more to say.
    """

    tier: str
    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """A lease was dropped without release; `origin` is where it was taken (debug mode), else empty."""

    owner: str
    nbytes: int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Event):
    """One `store` call ended: tokens newly stored, tokens already there, seconds."""

    num_tokens: int
    num_known_tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved(Event):
    """One `retrieve` call ended. `tokens_by_tier` sums to the tokens loaded."""

    num_tokens: int
    num_wanted_tokens: int
    tokens_by_tier: tuple[tuple[str, int], ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtNear(Event):
    """One `prefetch` ended. `bytes_by_tier` says where its frames were found, those in memory included."""

    bytes_by_tier: tuple[tuple[str, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoaded(Event):
    """One layer of a `retrieve_layers` is in the target. Times are `time.monotonic()` seconds."""

    layer: int
    num_tokens: int
    nbytes: int
    """What was read for this layer, headers included; 0 where whole frames were."""
    requested_at: float
    arrived_at: float
    """When its last range, and every whole frame, had come and was verified; never before `requested_at`."""
    scattered_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp(Event):
    """One `lookup` call ended."""

    num_tokens: int
    num_hit_tokens: int
    seconds: float


@runtime_checkable
class Observer(Protocol):
    """Receives every event, on the thread that caused it. Must return quickly; may not call back in."""

    def on_event(self, event: Event) -> None: ...


class EventBus:
    """Delivers events to observers; an observer that raises is logged once and removed.

    Never call `emit` while a lock is held (style.md 16). In a forked child it tells nobody: observers may
    have locks that a thread of the parent held, and what it does isn't the parent's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._observers: tuple[tuple[Observer, tuple[type[Event], ...]], ...] = ()
        self._watched: dict[type[Event], bool] = {}  # answers so far; replaced with the tuple
        self._lock = threading.Lock()  # guards replacement of both; readers take them as they are

    def subscribe(self, observer: Observer, *kinds: type[Event]) -> Callable[[], None]:
        """Adds `observer` for events of `kinds`, or of all kinds when none is named.

        Calling the returned function removes it (idempotent).
        """
        with self._lock:
            self._observers = (*self._observers, (observer, kinds or (Event,)))
            self._watched = {}
        return lambda: self._remove(observer)

    def watched(self, kind: type[Event]) -> bool:
        """Whether anyone wants events of `kind`: what spares building those that are frequent."""
        answers = self._watched
        answer = answers.get(kind)
        if answer is None:
            answer = answers[kind] = any(issubclass(kind, kinds) for _, kinds in self._observers)
        return answer

    def emit(self, event: Event) -> None:
        if os.getpid() != self._pid:
            return
        for observer, kinds in self._observers:
            if not isinstance(event, kinds):
                continue
            try:
                observer.on_event(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # recorded boundary: observers are foreign code, on threads of ours
                log.exception("observer %r raised and was removed", observer)
                self._remove(observer)

    def _remove(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(pair for pair in self._observers if pair[0] is not observer)
            self._watched = {}
