"""What a shard holds: keys, who reads them, and the order in which puts and deletes take effect."""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lmcache_core.sdk import BackendClosed, BackendError, DeadlineExceeded, StorageKey
from lmcache_core_disk.journal import Journal, JournalFull, Value, delete_record, put_record
from lmcache_core_disk.slots import Slot, Slots


class Patience(Protocol):
    """How long a caller waits: the `remaining` of a `Call`."""

    def remaining(self) -> float: ...


class Catalog:
    """The live values of one shard.

    A value's bytes are in its slot before its record is in the journal, and its record is in the
    journal before anyone can find it. A slot goes back to `slots` only once no value names it and no
    reader has it open.

    Two locks, taken in this order: `_commit` covers the journal and is held during its writes, so it
    is only ever taken with a time limit; `_lock` covers the dictionary and the reader counts, and
    never any I/O.
    """

    def __init__(self, slots: Slots, journal: Journal) -> None:
        self._slots = slots
        self._journal = journal
        self._commit = threading.Lock()
        self._lock = threading.Lock()
        self._values: dict[StorageKey, Value] = {}  # oldest first: in the order of their tokens
        self._token = 0
        self._closed = False

    def load(self) -> None:
        """Reads journal and slots, sweeps what a crash left behind, and opens the journal."""
        found = self._journal.load()
        present = self._slots.survey()
        values = {key: value for key, value in found.values.items() if value.slot in present}
        # A record of a missing slot must go before that slot's number is used again, and bytes after
        # the last record before anything is appended in front of them.
        rewrite = found.torn or len(values) < len(found.values)
        self._journal.start(found, [value.record for value in values.values()], rewrite=rewrite)
        self._slots.charge(self._journal.charged_nbytes)
        self._values, self._token = values, found.token
        live = [(value.slot, value.charged) for value in values.values()]
        self._slots.adopt(live, present.difference(slot for slot, _ in live))

    def close(self) -> None:
        """Refuses further changes. Takes no lock that I/O is done under."""
        self._closed = True

    # -- reading ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: StorageKey) -> bool:
        return key in self._values

    def find(self, key: StorageKey) -> Value | None:
        with self._lock:  # a replacement takes two steps: without it, a reader might fall between
            return self._values.get(key)

    def snapshot(self) -> list[Value]:
        with self._lock:
            return list(self._values.values())

    def shedding_order(self) -> Iterator[StorageKey]:
        """Every key, in the order to drop them: a child before its parent, of the leaves the oldest first.

        So the family that was written longest ago goes first, from its far end on, and what is left at any
        moment can be reached. Keys whose parents form a ring, which no engine writes, come last.
        """
        values = self.snapshot()
        tokens = {value.key: value.token for value in values}
        parents = {value.key: parent for value in values if (parent := value.parent) in tokens}
        num_children = Counter(parents.values())
        leaves = [(token, key) for key, token in tokens.items() if not num_children[key]]
        heapq.heapify(leaves)
        while leaves:
            _, key = heapq.heappop(leaves)
            del tokens[key]
            yield key
            parent = parents.get(key)
            if parent is not None:
                num_children[parent] -= 1
                if not num_children[parent]:
                    heapq.heappush(leaves, (tokens[parent], parent))
        yield from tokens

    def acquire(self, key: StorageKey) -> Value | None:
        """The value, its slot safe from recycling until `release`."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                value.readers += 1
            return value

    def release(self, value: Value) -> None:
        with self._lock:
            value.readers -= 1
            last = value.gone and value.readers == 0
        if last:
            self._leave(value)

    def page(self, prefix: str, after: int, limit: int) -> tuple[list[Value], bool]:
        """Up to `limit` values with tokens above `after`, oldest first, and whether there may be more."""
        values = self.snapshot()
        rows: list[Value] = []
        for position in range(bisect_right(values, after, key=lambda value: value.token), len(values)):
            if values[position].key.startswith(prefix):
                if len(rows) == limit:
                    return rows, True
                rows.append(values[position])
        return rows, False

    # -- changing --------------------------------------------------------------------------------

    def commit(
        self, key: StorageKey, parent: StorageKey | None, slot: Slot, patience: Patience
    ) -> Value | None:
        """Makes the written `slot` the value of `key`, in the place of what was.

        None: there is no room for the record within the capacity. Whenever no value comes back, what
        was still is, and the slot is freed.

        Raises:
            OSError: the journal can't be written.
            BackendClosed, DeadlineExceeded: it came too late.
        """
        try:
            with self._committing(patience):
                token = self._token + 1
                record = put_record(key, parent, token, slot.id, slot.nbytes, slot.charged)
                self._journal.append(record, self._records)
                self._token = token
                value = Value(key, token, slot.id, slot.nbytes, slot.charged, record)
                with self._lock:
                    old = self._values.pop(key, None)
                    self._values[key] = value
                    leaves = old is not None and self._retire(old)
                self._journal.live_nbytes += len(record)
        except JournalFull:
            self._slots.give_back(slot)
            return None
        except OSError:
            self._slots.discard(slot, reuse_id=False)  # the record may be there after all
            raise
        except BackendError:
            self._slots.give_back(slot)
            raise
        if old is not None and leaves:
            self._leave(old)
        return value

    def remove(self, key: StorageKey, patience: Patience, *, only: Value | None = None) -> Value | None:
        """Forgets `key` (while it is still `only`, if given) and frees its slot; None for a miss.

        Where the journal can't be written the slot's file is unlinked instead, which the next open
        takes for the same.

        Raises:
            OSError: neither was possible; the value is still there.
            BackendClosed, DeadlineExceeded: the value is still there.
        """
        with self._committing(patience):
            value = self._values.get(key)
            if value is None or (only is not None and value is not only):
                return None
            try:
                self._journal.append(delete_record(key, self._token + 1), self._records)
                self._token += 1
            except (JournalFull, OSError):
                self._slots.unlink(value.slot)
                value.unlinked = True
            with self._lock:
                del self._values[key]
                leaves = self._retire(value)
        if leaves:
            self._leave(value)
        return value

    @contextmanager
    def _committing(self, patience: Patience) -> Iterator[None]:
        if not self._commit.acquire(timeout=patience.remaining()):
            raise DeadlineExceeded("the journal was busy until the deadline")
        try:
            if self._closed:
                raise BackendClosed("closed while the call ran")
            yield
        finally:
            self._commit.release()

    def _records(self) -> Sequence[bytes]:
        return [value.record for value in self._values.values()]  # stable: _commit is held

    def _retire(self, value: Value) -> bool:
        """Under both locks: no longer findable. Whether its slot is free of readers now."""
        value.gone = True
        self._journal.live_nbytes -= len(value.record)
        return value.readers == 0

    def _leave(self, value: Value) -> None:
        slot = Slot(value.slot, value.nbytes, value.charged)
        if value.unlinked:
            self._slots.forget(slot, reuse_id=False)
        else:
            self._slots.give_back(slot)
