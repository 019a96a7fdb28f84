"""Pins: promises not to evict a chunk from a tier. They expire, and never touch a lease."""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmcache_core.errors import LeaseError
from lmcache_core.identity.keys import StorageKey

EXPIRED_REMEMBERED = 10_000
"""Expired lookup ids that a late unpin is still forgiven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What one lookup pinned, and until when."""

    lookup_id: str
    owner: str
    expires_at: float
    """By the table's clock."""
    keys: tuple[tuple[str, StorageKey], ...]
    """(tier, key), once for each promise."""


class PinTable:
    """Which (tier, key) must not be evicted now. Thread-safe; never blocks or calls out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Guards all below. Reentrant: a garbage collection may run a finalizer that unpins while this
        # thread is inside; so each method re-reads what a call in between could have changed.
        self._lock = threading.RLock()
        self._pins: dict[str, Pin] = {}
        self._counts: Counter[tuple[str, StorageKey]] = Counter()  # of unexpired pins, zeros removed
        self._expiries: list[tuple[float, str]] = []  # a heap; entries of ended or prolonged pins linger
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._num_expired = 0
        self._prefix = os.urandom(4).hex()  # an id from before a restart is unknown, not somebody else's
        self._sequence = itertools.count(1)

    def pin(
        self,
        keys: Iterable[tuple[str, StorageKey]],
        *,
        owner: str,
        ttl_s: float,
        lookup_id: str | None = None,
    ) -> str:
        """Pins each (tier, key) for `ttl_s`; returns the lookup id that unpins them.

        With the `lookup_id` of an active pin, adds to it and prolongs it.

        Raises:
            LeaseError: that lookup id belongs to another owner.
            ValueError: `ttl_s` is no finite number above 0.
        """
        if not 0 < ttl_s <= sys.float_info.max:  # nan would never expire, nor would any later pin
            raise ValueError(f"a pin lasts a finite number of seconds above 0, not {ttl_s}")
        with self._lock:
            now = self._clock()
            self._expire(now)
            expires_at = now + ttl_s
            if lookup_id is None:
                lookup_id = f"{self._prefix}-{next(self._sequence)}"
            added = tuple(keys)
            known = self._pins.get(lookup_id)
            if known is not None:
                if known.owner != owner:
                    raise LeaseError(f"lookup {lookup_id} is pinned by {known.owner}, not by {owner}")
                expires_at = max(expires_at, known.expires_at)
            self._expired.pop(lookup_id, None)
            self._counts.update(added)
            kept = known.keys if known is not None else ()
            self._pins[lookup_id] = Pin(
                lookup_id=lookup_id, owner=owner, expires_at=expires_at, keys=(*kept, *added)
            )
            if known is None or expires_at != known.expires_at:
                heapq.heappush(self._expiries, (expires_at, lookup_id))
            return lookup_id

    def unpin(self, lookup_id: str) -> int:
        """Ends exactly the pins of `lookup_id`; returns how many. 0 when they had expired.

        Raises:
            LeaseError: the id is unknown, or was unpinned before.
        """
        with self._lock:
            self._expire(self._clock())
            pin = self._pins.pop(lookup_id, None)
            if pin is not None:
                self._uncount(pin)
                if len(self._expiries) > 64 + 2 * len(self._pins):  # mostly entries of ended pins
                    self._expiries = [(each.expires_at, each.lookup_id) for each in self._pins.values()]
                    heapq.heapify(self._expiries)
                return len(pin.keys)
            if lookup_id in self._expired:
                del self._expired[lookup_id]
                return 0
        raise LeaseError(f"lookup {lookup_id!r} pins nothing: unknown, or unpinned before")

    def pinned(self, tier: str, key: StorageKey) -> bool:
        """True while an unexpired pin covers `key` in `tier`."""
        if not self._counts:  # usual, and exact without the lock: one read
            return False
        with self._lock:
            self._expire(self._clock())
            return (tier, key) in self._counts

    def active(self) -> tuple[Pin, ...]:
        """The unexpired pins."""
        with self._lock:
            self._expire(self._clock())
            return tuple(self._pins.values())

    @property
    def num_expired(self) -> int:
        """Lookups whose pins ran out before they were unpinned."""
        with self._lock:
            self._expire(self._clock())
            return self._num_expired

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, lookup_id = heapq.heappop(self._expiries)
            pin = self._pins.get(lookup_id)
            if pin is None or pin.expires_at != expires_at:
                continue
            if self._pins.pop(lookup_id, None) is None:
                continue
            self._uncount(pin)
            self._num_expired += 1
            self._expired[lookup_id] = None
            if len(self._expired) > EXPIRED_REMEMBERED:
                self._expired.popitem(last=False)

    def _uncount(self, pin: Pin) -> None:
        for each in pin.keys:
            self._counts[each] -= 1
            if not self._counts[each]:
                del self._counts[each]
