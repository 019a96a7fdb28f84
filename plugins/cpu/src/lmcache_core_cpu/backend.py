"""The cpu backend: values are references to frames in the process's own pool."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.sdk import (
    Backend,
    BackendClosed,
    BackendStats,
    Call,
    Capabilities,
    Entry,
    Hold,
    Host,
    Item,
    Lease,
    MemoryPool,
    Outcome,
    Page,
    Status,
    StorageKey,
    copy,
)
from lmcache_core_cpu.config import CpuConfig

CAPABILITIES = Capabilities(medium="memory", delete=True, scan=True, ranged=True, max_in_flight=8)
MISS = Outcome(status=Status.MISS)


@dataclass(frozen=True, slots=True)
class Value:
    """One resident frame. `hold` is ours; the pool may evict it at any time, which makes a miss."""

    hold: Hold
    token: int
    parent: StorageKey | None = None


class CpuBackend(Backend[CpuConfig]):
    """Keeps holds on frames in the pool. `adopt` and `borrow` move no byte; put and get copy.

    The capacity bounds the pool memory of all values, evicted ones that nobody asked for since
    included. No call blocks: put takes free pool memory or answers FULL.
    """

    config_class = CpuConfig

    def __init__(self, config: CpuConfig) -> None:
        self._values: dict[StorageKey, Value] = {}  # oldest first
        self._used = 0  # sum of slot_nbytes over _values
        self._token = 0
        self._capacity: int | None = None
        self._pool: MemoryPool | None = None
        self._tier = ""
        # Guards everything above. Holds and leases are touched outside it: they take the pool's lock.
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def open(self, host: Host) -> None:
        with self._lock:
            self._pool = host.pool
            self._capacity = host.capacity_bytes
            self._tier = host.tier

    def close(self) -> None:
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
            self._used = 0
            self._pool = None
        for value in values:
            value.hold.drop()

    # -- Resident: what the core uses ------------------------------------------------------------

    def adopt(self, key: StorageKey, hold: Hold) -> Outcome:
        return self._keep(key, hold, None)

    def borrow(self, key: StorageKey) -> Lease | None:
        found = self._find(key)
        return None if found is None else found[1]

    def discard(self, key: StorageKey, hold: Hold) -> bool:
        with self._lock:
            value = self._values.get(key)
        current = value is not None and value.hold is hold and self._forget(key, value)
        hold.drop()
        return current

    # -- Backend: the same as an ordinary store, by copying --------------------------------------

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            call.done(index, self._put(item))

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            call.done(index, self._get(item))

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.remaining()
            value = self._live(key)
            call.done(index, MISS if value is None else _describe(value))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.remaining()
            call.done(index, self._delete(key))

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        """Oldest first; the cursor is the last token seen, so a value stored anew is seen again."""
        call.remaining()
        with self._lock:
            rows = list(self._values.items())
        start = 0 if cursor is None else bisect_right(rows, int(cursor), key=lambda row: row[1].token)
        entries: list[Entry] = []
        for key, value in rows[start:]:
            if not key.startswith(prefix) or self._live(key) is None:
                continue
            if len(entries) == limit:
                return Page(entries=entries, cursor=str(entries[-1].token))
            entries.append(
                Entry(
                    key=key,
                    nbytes=value.hold.nbytes,
                    stored=value.hold.slot_nbytes,
                    parent=value.parent,
                    token=value.token,
                )
            )
        return Page(entries=entries)

    def stats(self) -> BackendStats:
        with self._lock:
            return BackendStats(
                entries=len(self._values), used_bytes=self._used, capacity_bytes=self._capacity
            )

    # -- inside ----------------------------------------------------------------------------------

    def _keep(self, key: StorageKey, hold: Hold, parent: StorageKey | None) -> Outcome:
        """Makes `hold` the value of `key`, or refuses it and changes nothing."""
        outcome = self._insert(key, hold, parent)
        if outcome.status is Status.FULL and self._sweep():
            outcome = self._insert(key, hold, parent)
        return outcome

    def _insert(self, key: StorageKey, hold: Hold, parent: StorageKey | None) -> Outcome:
        with self._lock:
            if self._pool is None:
                return self._closed("put", key)
            old = self._values.get(key)
            used = self._used + hold.slot_nbytes - (old.hold.slot_nbytes if old is not None else 0)
            if self._capacity is not None and used > self._capacity:
                return Outcome(status=Status.FULL)
            value = Value(hold, self._token + 1, parent)
            if old is not None:
                del self._values[key]  # from here no call, hence no place for Ctrl-C
            self._values[key] = value
            self._token += 1
            self._used = used
        if old is not None and old.hold is not hold:
            old.hold.drop()
        return _describe(value)

    def _sweep(self) -> bool:
        """Forgets values whose memory the pool took back; whether there were any."""
        with self._lock:
            keys = list(self._values)
        return sum(self._live(key) is None for key in keys) > 0

    def _find(self, key: StorageKey) -> tuple[Value, Lease] | None:
        """The value of `key` under a lease, forgetting one whose memory the pool took back."""
        while True:
            with self._lock:  # a replacement takes two steps: without it, a reader might fall between
                value = self._values.get(key)
            if value is None:
                return None
            lease = value.hold.lease("cpu")
            if lease is not None:
                return value, lease
            if self._forget(key, value):
                return None
            # Replaced or deleted since we looked: look again, or a value there would be called a miss.

    def _live(self, key: StorageKey) -> Value | None:
        found = self._find(key)
        if found is None:
            return None
        value, lease = found
        lease.release()
        return value

    def _forget(self, key: StorageKey, value: Value) -> bool:
        """Removes exactly this value; False when it is the value no longer."""
        with self._lock:
            if self._values.get(key) is not value:
                return False
            del self._values[key]
            self._used -= value.hold.slot_nbytes
            return True

    def _put(self, item: Item) -> Outcome:
        pool = self._pool
        if pool is None:
            return self._closed("put", item.key)
        lease = pool.try_allocate(item.nbytes, owner="cpu")
        if lease is None:
            return Outcome(status=Status.FULL)
        with lease:
            position = lease.address
            for view in item.views:
                copy(position, view.address, view.nbytes)
                position += view.nbytes
            hold = lease.hold(tag=item.key)
        outcome = self._keep(item.key, hold, item.parent)
        if outcome.status is not Status.OK:
            hold.drop()
        return outcome

    def _get(self, item: Item) -> Outcome:
        found = self._find(item.key)
        if found is None:
            return MISS
        value, lease = found
        with lease:
            if item.whole and lease.nbytes > item.nbytes:
                return Outcome(status=Status.TOO_SMALL, nbytes=lease.nbytes)
            if not item.whole and item.offset + item.nbytes > lease.nbytes:
                return MISS
            rest = lease.nbytes if item.whole else item.nbytes
            nbytes, position = rest, lease.address + item.offset
            for view in item.views:
                piece = min(view.nbytes, rest)
                copy(view.address, position, piece)
                position += piece
                rest -= piece
        return Outcome(status=Status.OK, nbytes=nbytes, token=value.token)

    def _delete(self, key: StorageKey) -> Outcome:
        while (value := self._live(key)) is not None:
            if self._forget(key, value):
                value.hold.drop()
                return _describe(value)
        return MISS

    def _closed(self, op: str, key: StorageKey) -> Outcome:
        error = BackendClosed("closed", backend=self._tier, op=op, key=key)
        return Outcome(status=Status.FAILED, error=error)


def _describe(value: Value) -> Outcome:
    hold = value.hold
    return Outcome(status=Status.OK, nbytes=hold.nbytes, stored=hold.slot_nbytes, token=value.token)
