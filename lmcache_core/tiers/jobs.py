"""The batches a storage tier hands its executor: loads, stores, deletes and stats of frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.errors import Corrupt, LMCacheError, PoolFull
from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold, Lease, MemoryPool
from lmcache_core.storage import Item, Job, Operation, Outcome, Priority, Status, View
from lmcache_core.storage.signal import Signal
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.index import Resident


def view_of(pool: MemoryPool, lease: Lease) -> View:
    """The whole of a lease as the contract's view."""
    return View(lease.address, lease.nbytes, pool.buffer, lease.offset)


def why(outcome: Outcome) -> str:
    """One line on an outcome that is not OK."""
    return str(outcome.error) if outcome.error is not None else outcome.status.value


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read of a copy: all of it, or a range."""

    copy: Resident
    nbytes: int
    offset: int = 0
    whole: bool = True


class LoadJob(Job):
    """Reads into memory of the pool, taken when the job is dispatched: for all, or for a shorter prefix.

    Calls `arrived(wanted, lease, header, outcome)` exactly once each; a lease that is given passes to the
    callee, with the header except for ranges that don't start at 0, which nobody has verified then.
    Memory of items that timed out stays with the job until the backend has let go of it.
    """

    operation = Operation.GET

    def __init__(
        self,
        pool: MemoryPool,
        wanted: Sequence[Wanted],
        arrived: Callable[[Wanted, Lease | None, FrameHeader | None, Outcome], None],
        *,
        tier: str,
        priority: Priority,
        deadline: float,
        allocate_until: Callable[[], float],
    ) -> None:
        self.priority = priority
        self.deadline = deadline
        self.num_items = len(wanted)
        self.nbytes = sum(each.nbytes for each in wanted)
        self._pool = pool
        self._wanted = wanted
        self._arrived = arrived
        self._owner = f"load {tier}"
        self._allocate_until = allocate_until
        self._lock = threading.Lock()  # guards _leases: a lease goes to its callee or is released, once
        self._leases: list[Lease | None] = []
        self._on_finished: Callable[[], None] = lambda: None

    def on_finished(self, action: Callable[[], None]) -> None:
        """Runs `action` once the backend has let go."""
        self._on_finished = action

    def give_up(self, outcome: Outcome) -> None:
        """Ends a job that was never submitted."""
        for index in range(self.num_items):
            self.settled(index, outcome, None)

    def prepare(self) -> Sequence[Item]:
        until = min(self.deadline, self._allocate_until())
        items = []
        for each in self._wanted:
            try:
                lease = self._pool.allocate(each.nbytes, owner=self._owner, deadline=until, reserve=True)
            except PoolFull:
                break
            self._leases.append(lease)
            views = (view_of(self._pool, lease),)
            copy = each.copy
            items.append(Item(copy.key, views, offset=each.offset, whole=each.whole, parent=copy.parent))
        return items

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        lease = None
        if outcome.status is Status.OK:
            with self._lock:
                lease, self._leases[index] = self._leases[index], None
        self._arrived(self._wanted[index], lease, header, outcome)

    def landed(self, index: int, outcome: Outcome) -> None:
        """A read that came too late: nobody waits for it, and its memory goes back in `finished`."""

    def finished(self) -> None:
        with self._lock:
            leases, self._leases = self._leases, [None] * len(self._leases)
        for lease in leases:
            if lease is not None:
                lease.release()
        self._on_finished()


class Write:
    """One frame on its way to a tier. Waiting, it has only an evictable hold on the bytes, unless they
    are to be `kept`: then a lease too, until it has ended.

    `since` is the index's moment when its request began: nothing used later leaves for it.
    """

    __slots__ = (
        "asked",
        "cancelled",
        "header",
        "hold",
        "in_doubt",
        "kept",
        "key",
        "nbytes",
        "retried",
        "running",
        "sealed",
        "since",
    )

    def __init__(
        self, frame: Frame, on_evict: Callable[[Hold], None], *, since: int | None, keep: bool
    ) -> None:
        self.key = frame.key
        self.header = frame.header
        self.nbytes = frame.nbytes
        self.sealed = frame.sealed
        self.hold = frame.lease.hold(tag=frame.key, on_evict=on_evict)
        self.cancelled = False
        self.asked = False  # handed to the backend: before that, it can't have landed
        self.running = False
        self.retried = False
        self.in_doubt = False  # timed out, and may yet land
        self.since = since
        self.kept = frame.lease.share("waiting write") if keep else None

    def release(self) -> None:
        """Lets go of the bytes. Once."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.release()
        self.hold.drop()


class StoreJob(Job):
    """Writes frames; each is sealed and leased only once the job is dispatched.

    Calls `stored(write, outcome)` exactly once a write when its fate is known, TIMEOUT included, and
    `late(write, outcome)` for a result that follows a TIMEOUT.
    """

    operation = Operation.PUT
    priority = Priority.STORE

    def __init__(
        self,
        pool: MemoryPool,
        writes: Sequence[Write],
        stored: Callable[[Write, Outcome], None],
        late: Callable[[Write, Outcome], None],
        done: Callable[[], None],
        *,
        tier: str,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self.num_items = len(writes)
        self.nbytes = sum(write.nbytes for write in writes)
        self._pool = pool
        self._writes = list(writes)
        self._stored = stored
        self._late = late
        self._done = done
        self._owner = f"store {tier}"
        self._leases: list[Lease] = []

    def prepare(self) -> Sequence[Item]:
        ready: list[Write] = []
        gone: list[Write] = []
        items = []
        for write in self._writes:
            lease = write.hold.lease(self._owner)
            if lease is None:
                write.cancelled = True
                gone.append(write)
                continue
            self._leases.append(lease)
            frame = Frame(write.header, lease, sealed=write.sealed)
            frame.seal()
            write.asked = True
            ready.append(write)
            items.append(Item(write.key, (view_of(self._pool, lease),), parent=frame.header.parent))
        self._writes = [*ready, *gone]  # item i is write i; the rest settles FULL, having lost its bytes
        return items

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        self._stored(self._writes[index], outcome)

    def landed(self, index: int, outcome: Outcome) -> None:
        self._late(self._writes[index], outcome)

    def finished(self) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()
        for write in self._writes:
            if write.in_doubt:  # the backend is gone without a word
                self._late(write, Outcome(status=Status.FAILED))
        self._done()


class DeleteJob(Job):
    """Removes copies: evicted, cleared or corrupt ones. `removed(copy, outcome)` once each."""

    operation = Operation.DELETE
    nbytes = 0

    def __init__(
        self,
        copies: Sequence[Resident],
        removed: Callable[[Resident, Outcome], None],
        done: Callable[[], None],
        *,
        deadline: float,
        priority: Priority = Priority.STORE,
    ) -> None:
        self.deadline = deadline
        self.priority = priority
        self.num_items = len(copies)
        self._copies = copies
        self._removed = removed
        self._done = done

    def prepare(self) -> Sequence[StorageKey]:
        return [copy.key for copy in self._copies]

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        self._removed(self._copies[index], outcome)

    def landed(self, index: int, outcome: Outcome) -> None:
        """A delete that came late: the copy, visible again meanwhile, turns out a miss when read."""

    def finished(self) -> None:
        self._done()


class StatJob(Job):
    """Asks a tier, whose contents this process does not decide, what it holds. Awaited by its caller."""

    operation = Operation.STAT
    priority = Priority.LOAD
    nbytes = 0

    def __init__(self, keys: Sequence[StorageKey], *, deadline: float) -> None:
        self.deadline = deadline
        self.num_items = len(keys)
        self.outcomes: list[Outcome | None] = [None] * len(keys)
        self._keys = keys
        self._open = len(keys)
        self._lock = threading.Lock()  # guards _open
        self._finished = Signal()

    def prepare(self) -> Sequence[StorageKey]:
        return self._keys

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        self.outcomes[index] = outcome
        with self._lock:
            self._open -= 1
            over = not self._open
        if over:
            self._finished.set()

    def landed(self, index: int, outcome: Outcome) -> None:
        """Too late to matter."""

    def finished(self) -> None:
        self._finished.set()

    def wait(self, timeout_s: float) -> None:
        self._finished.wait(timeout_s)


def is_corrupt(outcome: Outcome) -> bool:
    error: LMCacheError | None = outcome.error
    return isinstance(error, Corrupt)
