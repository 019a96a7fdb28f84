"""What is believed about a store that others change too, and what was found bad in any store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from lmcache_core.identity.keys import StorageKey

HINT_TTL_S = 5.0
MAX_BELIEVED = 100_000
MAX_REJECTED = 4096


class Hints:
    """Yeses that are believed for a few seconds, and keys whose bytes were bad and may still be there.

    Both are bounded. A hint is never a promise: it only saves asking again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all three
        self._believed: OrderedDict[StorageKey, float] = OrderedDict()  # until when; soonest first
        self._rejected: OrderedDict[StorageKey, None] = OrderedDict()
        self._failed: OrderedDict[StorageKey, int] = OrderedDict()  # the tier's good reads until then

    def believes(self, key: StorageKey) -> bool:
        return self._believed.get(key, 0.0) > self._clock()

    def believe(self, key: StorageKey) -> list[StorageKey]:
        """Believes in `key` from now on; returns keys that are no longer remembered at all."""
        forgotten = []
        with self._lock:
            self._believed[key] = self._clock() + HINT_TTL_S
            self._believed.move_to_end(key)
            while len(self._believed) > MAX_BELIEVED:
                forgotten.append(self._believed.popitem(last=False)[0])
        return forgotten

    def disbelieve(self, key: StorageKey) -> None:
        with self._lock:
            self._believed.pop(key, None)

    def reject(self, key: StorageKey) -> None:
        """The bytes under `key` were bad: don't ask for them again until they have been written anew."""
        with self._lock:
            self._believed.pop(key, None)
            self._rejected[key] = None
            if len(self._rejected) > MAX_REJECTED:
                self._rejected.popitem(last=False)

    def failed_again(self, key: StorageKey, good_reads: int) -> bool:
        """Notes a read that failed. Whether it failed before while the tier read others well since: then
        it is the value that can't be read, not the tier. `good_reads` is the tier's count so far."""
        with self._lock:
            before = self._failed.setdefault(key, good_reads)
            if len(self._failed) > MAX_REJECTED:
                self._failed.popitem(last=False)
        return before < good_reads

    @property
    def rejects_any(self) -> bool:
        return bool(self._rejected)

    def rejects(self, key: StorageKey) -> bool:
        return key in self._rejected

    def accept(self, key: StorageKey) -> None:
        with self._lock:
            self._rejected.pop(key, None)
            self._failed.pop(key, None)
