"""What is read from one storage tier: whole frames and ranges of them, and what a bad read tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from lmcache_core.events import Event, FrameRejected
from lmcache_core.frame import PAGE_NBYTES, FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Lease, MemoryPool
from lmcache_core.storage import Job, Outcome, Priority, Status
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.hints import Hints
from lmcache_core.tiers.index import ResidencyIndex, Resident
from lmcache_core.tiers.jobs import DeleteJob, LoadJob, Wanted, is_corrupt, why
from lmcache_core.tiers.loads import LoadQueue
from lmcache_core.tiers.writes import WriteQueue

LEAST_FRAME_NBYTES = 2 * PAGE_NBYTES

Arrived = Callable[[Wanted, Lease | None, FrameHeader | None, Outcome], None]


class ReadSource(Protocol):
    """What reads need of their tier."""

    name: str
    index: ResidencyIndex
    writes: WriteQueue
    batch_nbytes: int
    deadline_s: float

    @property
    def deletes(self) -> bool: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def max_loads(self) -> int:
        """Batches of loads the executor is given at once."""

    def submit(self, job: Job) -> None: ...
    def behind(self, function: Callable[[], None]) -> None:
        """Runs `function` on a thread where no Ctrl-C comes."""

    def failed(self, operation: str, outcome: Outcome) -> None: ...


class FrameReads:
    """Thread-safe; never blocks. `load` and `load_ranges` are only for threads where no Ctrl-C comes."""

    def __init__(
        self,
        tier: ReadSource,
        pool: MemoryPool,
        hints: Hints,
        *,
        emit: Callable[[Event], None],
        in_flight_bytes: int,
        allocate_deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.queue = LoadQueue(in_flight_bytes, lambda: tier.max_loads, tier.submit, clock)
        self._tier = tier
        self._pool = pool
        self._hints = hints
        self._emit = emit
        self._allocate_deadline_s = allocate_deadline_s
        self._clock = clock
        self._good_reads = 0  # roughly: only whether it grew matters

    def load(
        self,
        keys: Sequence[StorageKey],
        priority: Priority,
        deadline: float,
        arrived: Callable[[StorageKey, Frame | None, str], None],
    ) -> None:
        """Starts reading frames. `arrived` is called once a key, on any thread, and owns the frame given."""
        wanted = []
        for key in keys:
            copy = self._tier.index.get(key)
            if copy is None:
                arrived(key, None, "no longer there")
            elif not self._fits(copy.nbytes):
                self.reject(key, f"a value of {copy.nbytes} bytes is no frame that fits")
                arrived(key, None, "no frame")
            else:
                wanted.append(Wanted(copy, copy.nbytes))

        def settled(each: Wanted, lease: Lease | None, header: FrameHeader | None, outcome: Outcome) -> None:
            if lease is None or header is None:
                self.failed(each.copy, outcome)
                arrived(each.copy.key, None, why(outcome))
            else:
                self._good_reads += 1
                arrived(each.copy.key, Frame(header, lease, sealed=True), "")

        self._enqueue(wanted, settled, priority, deadline)

    def load_ranges(
        self, wanted: Sequence[Wanted], priority: Priority, deadline: float, arrived: Arrived
    ) -> None:
        """Starts reading ranges. `arrived` is called once each, and owns the lease given.

        Of what comes from the first byte on, header and first segment are verified; of the rest, nothing.
        """

        def settled(each: Wanted, lease: Lease | None, header: FrameHeader | None, outcome: Outcome) -> None:
            if lease is None:
                self.failed(each.copy, outcome)
            else:
                self._good_reads += 1
            arrived(each, lease, header, outcome)

        self._enqueue(wanted, settled, priority, deadline)

    def reject(self, key: StorageKey, reason: str) -> None:
        """What is stored under `key` is not to be read again until it has been written anew."""
        self._emit(FrameRejected(tier=self._tier.name, key=key, reason=reason))
        self._hints.reject(key)
        copy = self._tier.index.get(key)
        if copy is not None:
            self._tier.behind(partial(self._delete_bad, copy))

    def failed(self, copy: Resident, outcome: Outcome) -> None:
        """Draws the conclusions from a read of `copy` that brought nothing."""
        if is_corrupt(outcome) or outcome.status is Status.TOO_SMALL:
            self.reject(copy.key, why(outcome))
        elif outcome.status is Status.MISS:
            self._hints.disbelieve(copy.key)
            self._tier.index.remove(copy.key, "lost", token=copy.token)
        elif outcome.status in (Status.FAILED, Status.TIMEOUT):
            self._tier.failed("get", outcome)
            if outcome.status is Status.FAILED and self._hints.failed_again(copy.key, self._good_reads):
                reason = f"unreadable: {why(outcome)}"
                self._emit(FrameRejected(tier=self._tier.name, key=copy.key, reason=reason))
                self._hints.reject(copy.key)  # not deleted: it may be good, and a new write replaces it

    def _fits(self, nbytes: int) -> bool:
        """Whether a frame can be that long, and be read at all: what a store says may be anything."""
        return LEAST_FRAME_NBYTES <= nbytes <= self._pool.capacity_bytes and nbytes % PAGE_NBYTES == 0

    def _enqueue(
        self, wanted: Sequence[Wanted], arrived: Arrived, priority: Priority, deadline: float
    ) -> None:
        for batch in _batches(wanted, self._tier.max_batch, self._tier.batch_nbytes):
            self.queue.add(
                LoadJob(
                    self._pool,
                    batch,
                    arrived,
                    tier=self._tier.name,
                    priority=priority,
                    deadline=deadline,
                    allocate_until=lambda: self._clock() + self._allocate_deadline_s,
                )
            )

    def _delete_bad(self, copy: Resident) -> None:
        tier, index = self._tier, self._tier.index
        if not index.take_copy(copy, "rejected"):
            return
        if not tier.deletes:
            index.kept(copy)  # its bytes still count; a new write replaces it
            return

        def removed(victim: Resident, outcome: Outcome) -> None:
            if outcome.status in (Status.OK, Status.MISS):
                index.gone(victim)
            else:
                tier.failed("delete", outcome)
                index.kept(victim)

        deadline = self._clock() + tier.deadline_s
        tier.submit(DeleteJob([copy], removed, tier.writes.pump, deadline=deadline))


def _batches(wanted: Sequence[Wanted], max_batch: int, batch_nbytes: int) -> list[list[Wanted]]:
    batches: list[list[Wanted]] = []
    nbytes = 0
    for each in wanted:
        if not batches or len(batches[-1]) >= max_batch or nbytes + each.nbytes > batch_nbytes:
            batches.append([])
            nbytes = 0
        batches[-1].append(each)
        nbytes += each.nbytes
    return batches
