"""The writes on their way to one tier: waiting, making room, running."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial
from math import inf
from typing import Protocol

from lmcache_core.events import Event, StoreShed
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold, MemoryPool
from lmcache_core.storage import Job, Outcome, Status
from lmcache_core.storage.signal import Watched
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.index import ResidencyIndex, Resident
from lmcache_core.tiers.jobs import DeleteJob, StoreJob, Write, why

RECOVER_CAPACITY_S = 60.0
"""How long a store that was full below its bound is believed to have no more room."""


class WriteTarget(Protocol):
    """What the queue needs of its tier."""

    name: str
    index: ResidencyIndex
    batch_nbytes: int
    """Bytes in one batch, at most, unless one write alone is larger."""
    write_bytes: int
    """Bytes in all batches past waiting, at most, unless one batch alone is larger."""

    @property
    def usable(self) -> bool: ...
    @property
    def keeps_waiting(self) -> bool:
        """No memory tier holds the frames: waiting writes keep their bytes, and stores wait for room."""

    @property
    def deadline_s(self) -> float: ...
    @property
    def max_queued(self) -> int: ...
    @property
    def max_batches(self) -> int:
        """Batches of writes the executor is given at once."""

    @property
    def max_batch(self) -> int:
        """Writes, or deletes, in one batch, at most."""

    @property
    def capacity_bytes(self) -> int | None: ...
    def submit(self, job: Job) -> None: ...
    def wrote(self, key: StorageKey) -> None:
        """A good copy of `key` is there now."""

    def failed(self, operation: str, outcome: Outcome) -> None:
        """An item ended FAILED or TIMEOUT."""


class _Batch:
    """Writes that go to the backend in one call, once the victims that make their room are gone."""

    __slots__ = ("charged", "keys", "leaving", "nbytes", "stuck", "writes")

    def __init__(self, writes: list[Write], of: _Batch | None = None) -> None:
        """`of` is the batch that these are left of."""
        self.writes = writes
        self.nbytes = sum(write.nbytes for write in writes)
        self.charged: int = self.nbytes if of is None else of.charged  # against the bound of active bytes
        self.keys: list[StorageKey] = [write.key for write in writes] if of is None else of.keys
        self.leaving = 0  # calls that delete victims
        self.stuck = False  # a victim could not be deleted


class WriteQueue:
    """A bounded queue of evictable references, fed to the executor a few batches at a time.

    A write passes: waiting (an evictable hold, nothing more) → room reserved, victims being deleted →
    running (leased by its job) → settled. Each write ends exactly once: the copy admitted to the index,
    or a `StoreShed` event and its reservation given back. A write that timed out keeps its reservation
    until the backend lets go, since it may still land.
    """

    def __init__(
        self,
        target: WriteTarget,
        pool: MemoryPool,
        emit: Callable[[Event], None],
        behind: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._pool = pool
        self._emit = emit
        self._behind = behind
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._progress = Watched(self._lock, clock)
        self._waiting: deque[Write] = deque()
        self._writes: dict[StorageKey, Write] = {}  # waiting and running
        self._ready: deque[_Batch] = deque()  # room reserved, own victims gone
        self._active = 0  # batches past waiting
        self._active_bytes = 0
        self._active_keys: Counter[StorageKey] = Counter()  # their jobs may hold leases yet
        self._pumping = False
        self._ended = 0  # how many writes have, one way or another
        self._capacity_back_at = 0.0

    def __contains__(self, key: StorageKey) -> bool:
        return key in self._writes

    def offer(self, frame: Frame, since: int | None = None) -> bool:
        """Queues a frame under a reference of its own; the caller's lease is untouched. Never blocks.

        Nothing that was used after `since` leaves the tier for it.
        """
        target, key = self._target, frame.key
        if not target.usable:
            return self._shed(key, "tier down")
        with self._lock:
            if key in self._writes:
                return True
            full = len(self._waiting) >= target.max_queued
            if not full:
                write = Write(frame, self._evicted, since=since, keep=target.keeps_waiting)
                self._writes[key] = write
                self._waiting.append(write)
        if full:
            return self._shed(key, "queue full")
        self._behind(self.pump)
        return True

    def withdraw(self, key: StorageKey, reason: str = "evicted") -> None:
        """Gives up a write that still waits: its memory is wanted."""
        with self._lock:
            write = self._writes.get(key)
            if write is None:
                return
            write.cancelled = True
            waiting = not write.running
            if waiting:
                self._waiting.remove(write)  # it would count against the bound, behind a hung store for long
                del self._writes[key]
                self._progress.changed()
        if waiting:
            write.release()
            self._shed(key, reason)
        else:
            write.hold.drop()  # on its way without a lease yet, it finds its bytes gone at dispatch

    def withdraw_all(self, reason: str) -> None:
        with self._lock:
            keys = list(self._writes)
        for key in keys:
            self.withdraw(key, reason)

    def keys(self, prefix: str) -> list[StorageKey]:
        """Of the writes that wait or run."""
        with self._lock:
            return [key for key in self._writes if key.startswith(prefix)]

    def wait_for(self, keys: Collection[StorageKey], deadline: float) -> None:
        """Waits until no write of `keys` runs, and none holds its frame; or until the deadline."""
        self._progress.wait_for(lambda: self._active_keys.keys().isdisjoint(keys), deadline)

    def flush(self, deadline: float, patience_s: float = inf) -> bool:
        """Waits until nothing waits or runs. False when the deadline came first, or no write ended for
        `patience_s`."""
        self._behind(self.pump)
        while True:
            until = min(deadline, self._clock() + patience_s)
            if not self._progress.wait_for(partial(self._moved_since, self._ended), until):
                return False
            if self._idle:
                return True

    def depth(self) -> int:
        with self._lock:
            return len(self._writes)

    def pump(self) -> None:
        """Moves writes on, as far as batches and room allow. One thread pumps; the others leave it to it.

        Only for threads that Ctrl-C doesn't come to.
        """
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                batch, begun = self._next()
                if batch is None:
                    self._pumping = False
                    return
            if begun:
                self._run(batch)
            else:
                self._make_room(batch)

    # -- one batch -------------------------------------------------------------------------------

    def _next(self) -> tuple[_Batch | None, bool]:
        if self._ready:
            if self._target.index.begin(self._ready[0].nbytes):
                return self._ready.popleft(), True
            if not self._target.index.unsettled:  # what was to leave came back: room must be made anew
                batch = self._ready.popleft()
                for write in batch.writes:
                    self._target.index.unreserve(write.nbytes, begun=False)
                return batch, False
        full = self._active_bytes >= self._target.write_bytes
        if self._active and (full or self._active >= self._target.max_batches):
            return None, False
        writes: list[Write] = []
        nbytes = 0
        while self._waiting and len(writes) < self._target.max_batch:
            write = self._waiting[0]
            if writes and nbytes + write.nbytes > self._target.batch_nbytes:
                break
            writes.append(self._waiting.popleft())
            write.running = True
            nbytes += write.nbytes
        if not writes:
            return None, False
        batch = _Batch(writes)
        self._active += 1
        self._active_bytes += batch.charged
        self._active_keys.update(batch.keys)
        return batch, False

    def _make_room(self, wanted: _Batch) -> None:
        self._believe_the_bound_again()
        going: list[Write] = []
        victims: list[Resident] = []
        for write in wanted.writes:
            chosen = self._target.index.reserve(write.nbytes, write.since)
            if chosen is None:
                self._end(write)
                self._shed(write.key, "no room", "the rest is pinned or in use")
            else:
                going.append(write)
                victims.extend(chosen)
        if not going:
            self._batch_over(wanted)
            return
        batch = _Batch(going, wanted)
        if not victims:
            self._room_made(batch)
            return

        def removed(victim: Resident, outcome: Outcome) -> None:
            if outcome.status in (Status.OK, Status.MISS):
                self._target.index.gone(victim)
            else:
                batch.stuck = True
                self._target.failed("delete", outcome)
                self._target.index.kept(victim)

        def over() -> None:
            with self._lock:
                batch.leaving -= 1
                if batch.leaving:
                    return
            self._room_made(batch)

        deadline, most = self._clock() + self._target.deadline_s, self._target.max_batch
        pieces = [victims[start : start + most] for start in range(0, len(victims), most)]
        batch.leaving = len(pieces)
        for piece in pieces:
            self._target.submit(DeleteJob(piece, removed, over, deadline=deadline))

    def _room_made(self, batch: _Batch) -> None:
        if not batch.stuck:
            with self._lock:
                self._ready.append(batch)
            self.pump()
            return
        for write in batch.writes:
            self._target.index.unreserve(write.nbytes, begun=False)
            self._end(write)
            self._shed(write.key, "no room", "what should leave could not be deleted")
        self._batch_over(batch)

    def _run(self, batch: _Batch) -> None:
        self._target.submit(
            StoreJob(
                self._pool,
                batch.writes,
                self._stored,
                self._late,
                lambda: self._batch_over(batch),
                tier=self._target.name,
                deadline=self._clock() + self._target.deadline_s,
            )
        )

    def _batch_over(self, batch: _Batch) -> None:
        with self._lock:
            self._active -= 1
            self._active_bytes -= batch.charged
            self._active_keys -= Counter(batch.keys)
            self._progress.changed()
        self.pump()

    # -- outcomes --------------------------------------------------------------------------------

    def _stored(self, write: Write, outcome: Outcome) -> None:
        index = self._target.index
        if outcome.status is Status.OK:
            self._admit(write, outcome)
        elif outcome.status is Status.TIMEOUT:
            write.in_doubt = True
            self._target.failed("put", outcome)
            self._end(write)
            self._shed(write.key, "deadline")
        else:
            if outcome.status is Status.FAILED:
                self._doubt(write)
            else:
                index.unreserve(write.nbytes, begun=True)
            again = outcome.status is Status.FULL and not (write.retried or write.cancelled)
            if again and self._squeeze(write):
                return
            self._end(write)
            if write.cancelled:
                self._shed(write.key, "evicted")
            elif outcome.status is Status.FULL:
                self._shed(write.key, "full")
            else:
                self._target.failed("put", outcome)
                self._shed(write.key, "failed", why(outcome))

    def _late(self, write: Write, outcome: Outcome) -> None:
        write.in_doubt = False
        if outcome.status is Status.OK:
            self._admit(write, outcome)
        elif outcome.status is Status.FAILED:
            self._doubt(write)
        else:
            self._target.index.unreserve(write.nbytes, begun=True)

    def _doubt(self, write: Write) -> None:
        """A put that failed may have taken effect all the same. Its bytes count until it is deleted, or,
        where that fails too, as a copy that may be there: reading or evicting it will tell."""
        index, header = self._target.index, write.header
        copy = Resident(write.key, write.nbytes, write.nbytes, parent=header.parent)

        def removed(copy: Resident, outcome: Outcome) -> None:
            if outcome.status in (Status.OK, Status.MISS):
                index.unreserve(write.nbytes, begun=True)
            else:
                index.admit(copy, reserved=write.nbytes)

        if not write.asked or self._target.capacity_bytes is None:  # or the store keeps its own bound
            index.unreserve(write.nbytes, begun=True)
            return
        deadline = self._clock() + self._target.deadline_s
        self._target.submit(DeleteJob([copy], removed, self.pump, deadline=deadline))

    def _admit(self, write: Write, outcome: Outcome) -> None:
        stored = write.nbytes if outcome.stored is None else outcome.stored
        self._target.index.admit(
            Resident(write.key, write.nbytes, stored, parent=write.header.parent, token=outcome.token),
            reserved=write.nbytes,
        )
        self._target.wrote(write.key)
        self._end(write)

    def _squeeze(self, write: Write) -> bool:
        """The store was full below its bound: believe it for a while, evict, and try once more."""
        index = self._target.index
        stats = index.stats()
        if stats.capacity_bytes is None or stats.used_bytes == 0:
            return False
        index.set_capacity(min(stats.capacity_bytes, stats.used_bytes))
        with self._lock:
            self._capacity_back_at = self._clock() + RECOVER_CAPACITY_S
            write.retried = True
            write.running = False
            self._waiting.appendleft(write)
        return True

    def _believe_the_bound_again(self) -> None:
        """Here, since what was kept when it was full may be less than any write to come."""
        with self._lock:
            over = 0.0 < self._capacity_back_at <= self._clock()
            if over:
                self._capacity_back_at = 0.0
        if over:
            self._target.index.set_capacity(self._target.capacity_bytes)

    def _evicted(self, hold: Hold) -> None:
        if hold.tag is not None:
            self.withdraw(hold.tag)

    @property
    def _idle(self) -> bool:
        return not self._writes and not self._active

    def _moved_since(self, ended: int) -> bool:
        return self._idle or self._ended != ended

    def _end(self, write: Write) -> None:
        write.release()
        with self._lock:
            if self._writes.get(write.key) is write:
                del self._writes[write.key]
            self._ended += 1
            self._progress.changed()

    def _shed(self, key: StorageKey, reason: str, detail: str = "") -> bool:
        self._emit(StoreShed(tier=self._target.name, key=key, reason=reason, detail=detail))
        return False
