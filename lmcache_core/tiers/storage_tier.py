"""A tier behind an executor: what it holds, how frames come from it, and how it goes down and heals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lmcache_core.errors import BackendError, BackendUnavailable, ConfigError, PermissionDenied
from lmcache_core.events import EventBus, TierUp
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import MemoryPool, PinTable
from lmcache_core.storage import Capabilities, Job, Outcome, Priority, Status, TierExecutor
from lmcache_core.storage.signal import Signal
from lmcache_core.tiers.failures import Failures
from lmcache_core.tiers.hints import Hints
from lmcache_core.tiers.index import ResidencyIndex, Resident
from lmcache_core.tiers.jobs import DeleteJob, StatJob
from lmcache_core.tiers.opening import Opener
from lmcache_core.tiers.reads import FrameReads
from lmcache_core.tiers.writes import WriteQueue

BATCH_NBYTES = 16 << 20
MAX_BATCH = 512
GRACE_S = 0.25
"""How long past a deadline the executor may take to say so before a waiter gives up on it."""


class OpenTier(Protocol):
    """Builds backend and executor anew, without I/O. The callbacks become the host's."""

    def __call__(
        self,
        lost: Callable[[Sequence[tuple[StorageKey, int | None]], str], None],
        lost_all: Callable[[str], None],
    ) -> TierExecutor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTierOptions:
    """What the config says of one tier, in plain units."""

    name: str
    capacity_bytes: int | None
    deadline_s: float
    max_queued: int
    max_in_flight: int | None
    """Calls at once, at most; None: as the backend says."""
    in_flight_bytes: int
    allocate_deadline_s: float
    keeps_waiting: bool
    """No memory tier holds what waits to be written."""


class StorageTier:
    """One configured tier whose bytes lie outside this process's memory.

    It is *exact* when only this process changes it and it can say at open what it holds: then the index
    is the truth and decides evictions. Otherwise the index is a hint, believed for a few seconds, and
    the store is asked. A tier that can't be opened, now or later, is down: it holds nothing, takes
    nothing, and is tried again in the background. After `open` no method raises for what the backend
    does, and none blocks beyond the deadline it is given.

    What would leave the books wrong if Ctrl-C cut it short is done `behind`: in order, on a thread where
    none comes. A caller hands over, and waits.
    """

    def __init__(
        self,
        options: StorageTierOptions,
        open_tier: OpenTier,
        *,
        pool: MemoryPool,
        pins: PinTable,
        events: EventBus,
        behind: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = options.name
        self.deadline_s = options.deadline_s
        self.max_queued = options.max_queued
        # Half of what may be in flight is for loads; of the rest, half may be active when a batch is added.
        self.write_bytes = options.in_flight_bytes // 4
        self.batch_nbytes = min(BATCH_NBYTES, self.write_bytes)
        self.index = ResidencyIndex(
            options.name, None, pinned=lambda key: pins.pinned(options.name, key), events=events
        )
        self.writes = WriteQueue(self, pool, events.emit, behind, clock)
        self.configured_bytes = options.capacity_bytes
        self.capacity_bytes: int | None = None  # what the index enforces, once open
        self.exact = False
        self.capabilities = Capabilities()
        self._hints = Hints(clock)
        self._failures = Failures(options.name, events.emit, clock)
        self.reads = FrameReads(
            self,
            pool,
            self._hints,
            emit=events.emit,
            in_flight_bytes=options.in_flight_bytes // 2,
            allocate_deadline_s=options.allocate_deadline_s,
            clock=clock,
        )
        self._options = options
        self._open_tier = open_tier
        self._emit = events.emit
        self._behind = behind
        self._clock = clock
        self._opener = Opener(options.name, self._open, emit=events.emit, clock=clock)
        self._lock = threading.Lock()  # guards the two below
        self._executor: TierExecutor | None = None
        self._closed = False

    # -- opening, closing ------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        if self._executor is not None:
            return True
        self._opener.again_if_due()
        return False

    def start(self) -> None:
        """Opens the tier, waiting no longer than its deadline: then it goes on behind, the tier being down.

        A store that can't be reached leaves the tier down, to be tried again; that is an event.

        Raises:
            ConfigError: the configuration or its rights can't work; says what to change.
            PluginError: the backend offers more than it declared.
        """
        self._opener.start(self.deadline_s)

    def retry_now(self) -> None:
        """Makes a tier that is down try to open again at its next use, however soon."""
        self._opener.retry_now()

    def _open(self, timeout_s: float) -> None:
        """Opens the backend and takes over what it kept."""
        deadline = self._clock() + timeout_s
        executor = self._open_tier(self._lost, self.index.forget_all)
        try:
            capabilities = executor.open(deadline)
            exact = not (capabilities.shared or capabilities.self_evicting) and (
                capabilities.scan or not capabilities.persistent
            )
            kept = executor.scan("", deadline) if exact and capabilities.persistent else []
        except BaseException as error:
            executor.close(self._clock())
            if isinstance(error, PermissionDenied):
                raise ConfigError(str(error)) from error
            raise
        self.capabilities = capabilities
        self.exact = exact
        self.capacity_bytes = self._bound(executor) if exact and capabilities.delete else None
        self.index.set_capacity(self.capacity_bytes)
        self.index.load(
            [
                Resident(
                    entry.key,
                    entry.nbytes,
                    entry.nbytes if entry.stored is None else entry.stored,
                    parent=entry.parent,
                    token=entry.token,
                )
                for entry in kept
            ]
        )
        with self._lock:
            closed = self._closed
            if not closed:
                self._executor = executor
        if closed:
            executor.close(self._clock())
        else:
            self._emit(TierUp(tier=self.name))

    def _bound(self, executor: TierExecutor) -> int | None:
        """What the tier may hold: the configured bound, or the smaller share that the store says is ours."""
        bounds = (self.configured_bytes, executor.backend_stats().capacity_bytes)
        return min([bound for bound in bounds if bound is not None], default=None)

    def close(self, deadline: float) -> None:
        """Writes what waits, as far as the deadline allows, and closes the backend. Idempotent."""
        if self._executor is not None:
            self.writes.flush(deadline, 2 * self.deadline_s)  # a write may wait for a delete and a put
        self._opener.stop()
        with self._lock:
            self._closed = True
        self.writes.withdraw_all("closing")
        executor = self._executor  # another thread may close it, too
        if executor is not None:
            executor.close(deadline)
            self._executor = None

    # -- what is here ----------------------------------------------------------------------------

    def contains(self, key: StorageKey) -> bool:
        """Whether `key` can be had from here, as far as is known without asking."""
        if not self.readable or key not in self.index or self._hints.rejects(key):
            return False
        return self.exact or self._hints.believes(key)

    def lacks(self, key: StorageKey) -> bool:
        """Whether a write of `key` would bring something: it isn't here, or what is here is bad."""
        if key in self.writes:
            return False
        known = key in self.index and (self.exact or self._hints.believes(key))
        return not known or self._hints.rejects(key)

    @property
    def readable(self) -> bool:
        """Usable, and its read breaker is not open: what it holds can be hoped for."""
        executor = self._executor
        return self.usable and executor is not None and not executor.refuses_reads

    def prefix_length(self, keys: Sequence[StorageKey], start: int, deadline: float) -> int:
        """How many of `keys` from `start` on are here without a gap; asks the store where it must."""
        if not self.readable:
            return 0
        position = start
        if self.exact:
            length = self.index.prefix_length(keys, start)
            return length if not self._hints.rejects_any else self._before_rejected(keys, start, length)
        while position < len(keys) and self.contains(keys[position]):
            position += 1
        while position < len(keys):
            asked = keys[position : position + self.max_batch]
            answers = self._ask(asked, deadline)
            found = answers.index(False) if False in answers else len(asked)
            position += found
            if found < len(asked):
                break
        return position - start

    def _before_rejected(self, keys: Sequence[StorageKey], start: int, length: int) -> int:
        for position in range(start, start + length):
            if self._hints.rejects(keys[position]):
                return position - start
        return length

    def held(self, keys: Sequence[StorageKey], deadline: float) -> list[bool]:
        """Which of `keys` are here; asks the store where it must, for all of them at once."""
        if self.exact or not self.readable:
            return [self.contains(key) for key in keys]
        answers: list[bool] = []
        for start in range(0, len(keys), self.max_batch):
            answers += self._ask(keys[start : start + self.max_batch], deadline)
        return answers

    def list_keys(self, prefix: str, deadline: float) -> list[StorageKey]:
        """All keys that start with `prefix`, as far as the tier can tell."""
        executor = self._executor
        if executor is None or self.exact or not self.capabilities.scan:
            return self.index.keys(prefix)
        try:
            return [entry.key for entry in executor.scan(prefix, deadline)]
        except BackendError as error:
            self.failed("scan", Outcome(status=Status.FAILED, error=error))
            return []

    def _ask(self, keys: Sequence[StorageKey], deadline: float) -> list[bool]:
        deadline = min(deadline, self._clock() + self.deadline_s)
        if deadline <= self._clock():
            return [False] * len(keys)
        job = StatJob(keys, deadline=deadline)
        self._behind(partial(self.submit, job))
        job.wait(deadline - self._clock() + GRACE_S)
        answers = []
        for key, outcome in zip(keys, list(job.outcomes), strict=True):
            held = outcome is not None and outcome.status is Status.OK and not self._hints.rejects(key)
            if outcome is not None and outcome.status is Status.OK and held:
                self._believe(Resident(key, outcome.nbytes, outcome.nbytes, token=outcome.token))
            elif outcome is not None and outcome.status is Status.MISS:
                self._disbelieve(key)
            answers.append(held)
        failed = [o for o in job.outcomes if o is not None and o.status in (Status.FAILED, Status.TIMEOUT)]
        if failed:
            self.failed("stat", failed[0])
        return answers

    # -- removing --------------------------------------------------------------------------------

    def remove(self, keys: Sequence[StorageKey], reason: str, deadline: float) -> int:
        """Deletes these copies, waiting until the deadline; pinned ones stay. Returns how many went."""
        if not self.capabilities.delete:
            return 0
        removed: list[Resident] = []
        over = Signal()

        def begin() -> None:
            victims: list[Resident] = []
            self.index.take(keys, reason, victims)
            settled: list[Resident] = []

            def note(victim: Resident, outcome: Outcome) -> None:
                if outcome.status in (Status.OK, Status.MISS):
                    self.index.gone(victim)
                    self._hints.disbelieve(victim.key)
                    removed.append(victim)
                else:
                    self.failed("delete", outcome)
                    self.index.kept(victim)
                settled.append(victim)
                if len(settled) == len(victims):
                    over.set()

            for start in range(0, len(victims), self.max_batch):
                batch = victims[start : start + self.max_batch]
                job = DeleteJob(batch, note, self.writes.pump, deadline=deadline, priority=Priority.LOAD)
                self.submit(job)
            if not victims:
                over.set()

        self._behind(begin)
        over.wait(deadline - self._clock() + GRACE_S)
        self._behind(self.writes.pump)
        return len(removed)

    # -- what reads and writes need --------------------------------------------------------------

    @property
    def keeps_waiting(self) -> bool:
        return self._options.keeps_waiting

    @property
    def deletes(self) -> bool:
        return self.capabilities.delete

    @property
    def max_batch(self) -> int:
        return self.capabilities.max_batch or MAX_BATCH

    @property
    def max_batches(self) -> int:
        offered = max(1, self.capabilities.max_in_flight)
        wanted = self._options.max_in_flight
        return offered if wanted is None else min(offered, wanted)

    @property
    def max_loads(self) -> int:
        return self.max_batches + self.max_queued // 2  # what waits for a slot shares the queue with the rest

    def submit(self, job: Job) -> None:
        executor = self._executor
        if executor is not None:
            executor.submit(job)
            return
        error = BackendUnavailable("the tier is down", backend=self.name)
        for index in range(job.num_items):
            job.settled(index, Outcome(status=Status.FAILED, error=error), None)
        job.finished()

    def behind(self, function: Callable[[], None]) -> None:
        self._behind(function)

    def verify(self, check: Callable[[], None]) -> None:
        executor = self._executor
        if executor is not None:
            executor.verify(check)
        else:
            check()

    def wrote(self, key: StorageKey) -> None:
        self._hints.accept(key)
        if not self.exact:
            self._forget_all(self._hints.believe(key))

    def failed(self, operation: str, outcome: Outcome) -> None:
        self._failures.note(operation, outcome)

    # -- inside ----------------------------------------------------------------------------------

    def _lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        for key, token in copies:
            self.index.remove(key, reason, token=token)
        self.writes.pump()

    def _believe(self, copy: Resident) -> None:
        if copy.key not in self.index:
            self.index.admit(copy)
        self._forget_all(self._hints.believe(copy.key))

    def _forget_all(self, keys: Sequence[StorageKey]) -> None:
        for key in keys:
            self.index.remove(key, "hint expired")

    def _disbelieve(self, key: StorageKey) -> None:
        self._hints.disbelieve(key)
        if not self.exact:
            self.index.remove(key, "lost")
