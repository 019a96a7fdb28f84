"""A store under the core: the tier executor, real pool memory, and jobs that check how they are treated."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from lmcache_core.events import EventBus
from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Lease, MemoryPool
from lmcache_core.storage import (
    Backend,
    Breaker,
    Item,
    Job,
    Operation,
    Outcome,
    Priority,
    RetryBudget,
    Status,
    TierExecutor,
    TierHost,
    Verifier,
    View,
)
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.values import PART
from lmcache_core_conformance.verdicts import Violation, check

_MARK = 0xA5
_FAILURES = 5


class FrameJob(Job):
    """One batch of frames. Memory is marked before it is filled, and again when it is given back.

    With `keep_memory` it goes back to the pool by `release` only, so that late writes can be seen.
    """

    priority = Priority.LOAD

    def __init__(
        self,
        pool: MemoryPool,
        operation: Operation,
        keys: Sequence[StorageKey],
        *,
        deadline: float,
        frames: Sequence[bytes] = (),
        view_nbytes: int = 0,
        keep_memory: bool = False,
    ) -> None:
        self.operation = operation
        self.deadline = deadline
        self.num_items = len(keys)
        self._lengths = [len(frame) for frame in frames] or [view_nbytes] * len(keys)
        moves = operation in (Operation.GET, Operation.PUT)
        self.nbytes = sum(self._lengths) if moves else 0
        self.outcomes: dict[int, Outcome] = {}
        self.landings: dict[int, Outcome] = {}
        self.values: dict[int, bytes] = {}
        self.faults: list[str] = []
        self.leases: list[Lease] = []
        self._pool = pool
        self._keys = keys
        self._frames = frames
        self._keep_memory = keep_memory
        self.left_s = 0.0
        """What was left of its time when the backend was about to be called; 0 until then."""
        self._changed = threading.Condition()  # guards what follows, the outcomes and the landings
        self.is_finished = False
        self._began = time.monotonic()
        self._ended: float | None = None

    def prepare(self) -> Sequence[Item] | Sequence[StorageKey]:
        if not self.nbytes:
            return self._keys
        items = []
        for index, key in enumerate(self._keys):
            lease = self._pool.allocate(self._lengths[index], owner="conformance", deadline=0.0, reserve=True)
            self.leases.append(lease)
            lease.memory[:] = self._frames[index] if self._frames else bytes([_MARK]) * lease.nbytes
            items.append(Item(key, (View(lease.address, lease.nbytes, lease.memory),)))
        self.left_s = self.deadline - time.monotonic()
        return items

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        with self._changed:
            if index in self.outcomes:
                self.faults.append(f"item {index} was settled twice")
            if outcome.status is Status.OK and self.operation is Operation.GET:
                self.values[index] = bytes(self.leases[index].memory[: outcome.nbytes])
            self.outcomes[index] = outcome
            if len(self.outcomes) == self.num_items:
                self._ended = time.monotonic()
            self._changed.notify_all()

    @property
    def took_s(self) -> float:
        """How long it took until every item was settled, or until now."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def statuses(self) -> list[Status]:
        """How the items ended that are settled."""
        with self._changed:
            return [outcome.status for outcome in self.outcomes.values()]

    def landed(self, index: int, outcome: Outcome) -> None:
        with self._changed:
            self.landings[index] = outcome

    def finished(self) -> None:
        for lease in self.leases:
            lease.memory[:] = bytes([_MARK]) * lease.nbytes
        if not self._keep_memory:
            self.release()
        with self._changed:
            self.is_finished = True
            self._changed.notify_all()

    def release(self) -> None:
        """Gives the memory back. Idempotent."""
        leases, self.leases = self.leases, []
        for lease in leases:
            lease.release()

    def wait_settled(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.outcomes) == self.num_items, timeout_s)

    def wait_finished(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_finished, timeout_s)


class Core:
    """One opened backend under a `TierExecutor` that retries nothing, with a pool of its own."""

    def __init__(self, harness: Harness, backend: Backend[Any], *, capacity_bytes: int) -> None:
        self.backend = backend
        self._patience_s = harness.deadline_s
        self._slack_s = harness.slack_s
        self.pool = MemoryPool(2 * harness.small_capacity_bytes + (4 << 20), huge_pages=False)
        self.lost: list[tuple[StorageKey, int | None]] = []
        self.read_breaker = Breaker(failures=_FAILURES, cool_down_s=harness.deadline_s)
        self._verifier = Verifier()
        self.executor = TierExecutor(
            backend,
            TierHost(
                tier="conformance",
                deadline_s=harness.deadline_s,
                max_in_flight=backend.capabilities.max_in_flight,
                capacity_bytes=capacity_bytes,
                parts=(PART,),
                pool=self.pool,
                on_lost=lambda copies, reason: self.lost.extend(copies),
                on_lost_all=lambda reason: None,
            ),
            max_in_flight=backend.capabilities.max_in_flight,
            in_flight_bytes=self.pool.capacity_bytes,
            queue_limit=64,
            read_breaker=self.read_breaker,
            write_breaker=Breaker(failures=_FAILURES, cool_down_s=harness.deadline_s),
            retry=RetryBudget(ratio=0.0, most=0.0),
            verifier=self._verifier,
            events=EventBus(),
        )
        self.calls: list[FrameJob] = []
        self._keeping: list[FrameJob] = []
        self._closed = False
        try:
            self.executor.open(time.monotonic() + harness.deadline_s)
        except BaseException:
            self._end()
            raise

    def submit(
        self,
        operation: Operation,
        keys: Sequence[StorageKey],
        *,
        frames: Sequence[bytes] = (),
        view_nbytes: int = 0,
        deadline_s: float | None = None,
        keep_memory: bool = False,
    ) -> FrameJob:
        job = FrameJob(
            self.pool,
            operation,
            keys,
            deadline=time.monotonic() + (self._patience_s if deadline_s is None else deadline_s),
            frames=frames,
            view_nbytes=view_nbytes,
            keep_memory=keep_memory,
        )
        self.calls.append(job)
        if keep_memory:
            self._keeping.append(job)
        self.executor.submit(job)
        return job

    def run(
        self,
        operation: Operation,
        keys: Sequence[StorageKey],
        *,
        frames: Sequence[bytes] = (),
        view_nbytes: int = 0,
    ) -> FrameJob:
        """Submits a job and waits for it.

        Raises:
            Violation: it did not finish, although the store does nothing to delay it.
        """
        job = self.submit(operation, keys, frames=frames, view_nbytes=view_nbytes)
        check(job.wait_settled(self._patience_s + self._slack_s), f"a {operation.value} was never settled")
        # Every item is settled, so nothing stands between the backend and letting go of its memory.
        check(job.wait_finished(self._slack_s), f"a {operation.value} keeps memory after its items settled")
        return job

    def put(self, key: StorageKey, frame: bytes) -> None:
        """
        Raises:
            Violation: the frame was not stored.
        """
        outcome = self.run(Operation.PUT, [key], frames=[frame]).outcomes[0]
        check(outcome.status is Status.OK, f"put through the core: {outcome.status.name} ({outcome.error})")

    def get(self, key: StorageKey, view_nbytes: int) -> tuple[Outcome, bytes]:
        job = self.run(Operation.GET, [key], view_nbytes=view_nbytes)
        return job.outcomes[0], job.values.get(0, b"")

    @staticmethod
    def check_untouched(job: FrameJob) -> None:
        """
        Raises:
            Violation: memory that the job gave back has been written to.
        """
        for lease in job.leases:
            if bytes(lease.memory) != bytes([_MARK]) * lease.nbytes:
                raise Violation("memory was written to after the backend had let go of it")

    def close(self) -> None:
        if not self._closed:
            self.executor.close(time.monotonic() + self._patience_s)
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._verifier.close()
        for job in self._keeping:
            if job.is_finished:
                job.release()
        if not self.pool.stats().leases:  # else its memory is quarantined, and must stay mapped
            self.pool.close()
