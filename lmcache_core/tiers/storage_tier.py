"""A tier behind an executor: what it holds, how frames come from it, and how it goes down and heals."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_core.errors import BackendError, BackendUnavailable, ConfigError, LMCacheError, PermissionDenied
from lmcache_core.events import Event, FrameRejected, TierDown, TierUp
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import MemoryPool, PinTable
from lmcache_core.storage import Capabilities, Job, Outcome, Priority, Status, TierExecutor
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.index import ResidencyIndex, Resident
from lmcache_core.tiers.jobs import DeleteJob, LoadJob, StatJob, is_corrupt, why
from lmcache_core.tiers.writes import WriteQueue

log = logging.getLogger(__name__)

BATCH_NBYTES = 16 << 20
HINT_TTL_S = 5.0
GRACE_S = 1.0
"""How long past a deadline the executor may take to say so before a waiter gives up on it."""
MAX_REJECTED = 4096
MAX_BELIEVED = 100_000
REOPEN_FIRST_S = 1.0
REOPEN_MOST_S = 60.0


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
    in_flight_bytes: int
    allocate_deadline_s: float


class StorageTier:
    """One configured tier whose bytes lie outside this process's memory.

    It is *exact* when only this process changes it and it can say at open what it holds: then the index
    is the truth and decides evictions. Otherwise the index is a hint, believed for a few seconds, and
    the store is asked. A tier that can't be opened, now or later, is down: it holds nothing, takes
    nothing, and is tried again in the background. After `open` no method raises for what the backend
    does, and none blocks beyond the deadline it is given.
    """

    def __init__(
        self,
        options: StorageTierOptions,
        open_tier: OpenTier,
        *,
        pool: MemoryPool,
        pins: PinTable,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = options.name
        self.deadline_s = options.deadline_s
        self.max_queued = options.max_queued
        self.batch_nbytes = min(BATCH_NBYTES, options.in_flight_bytes)
        self.index = ResidencyIndex(
            options.name, None, pinned=lambda key: pins.pinned(options.name, key), emit=emit
        )
        self.writes = WriteQueue(self, pool, emit, clock)
        self.capacity_bytes: int | None = None  # what the index enforces, once open
        self.exact = False
        self.capabilities = Capabilities()
        self._options = options
        self._open_tier = open_tier
        self._pool = pool
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self._executor: TierExecutor | None = None
        self._closed = False
        self._opening = False
        self._reopen_at = float("inf")
        self._reopen_delay_s = REOPEN_FIRST_S
        self._believed: dict[StorageKey, float] = {}  # not exact: until when a yes is believed
        self._rejected: OrderedDict[StorageKey, None] = OrderedDict()  # corrupt, and can't be deleted

    # -- opening, closing ------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        if self._executor is not None:
            return True
        self._reopen_if_due()
        return False

    def open(self, deadline: float) -> None:
        """Opens the backend and takes over what it kept.

        A store that can't be reached leaves the tier down, to be tried again; that is an event.

        Raises:
            ConfigError: the configuration or its rights can't work; says what to change.
            PluginError: the backend offers more than it declared.
        """
        executor = self._open_tier(self._lost, self.index.forget_all)
        try:
            capabilities = executor.open(deadline)
            exact = not (capabilities.shared or capabilities.self_evicting) and (
                capabilities.scan or not capabilities.persistent
            )
            kept = executor.scan("", deadline) if exact and capabilities.persistent else []
        except PermissionDenied as error:
            executor.close(self._clock())
            raise ConfigError(f"tier {self.name!r}: {error}") from error
        except BackendError as error:
            executor.close(self._clock())
            self._went_down(error)
            return
        except LMCacheError:  # the configuration, or a plugin that breaks the contract
            executor.close(self._clock())
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
                self._reopen_delay_s = REOPEN_FIRST_S
        if closed:
            executor.close(self._clock())
        else:
            self._emit(TierUp(tier=self.name))

    def _bound(self, executor: TierExecutor) -> int | None:
        """What the tier may hold: the configured bound, or the smaller share that the store says is ours."""
        bounds = (self._options.capacity_bytes, executor.backend_stats().capacity_bytes)
        return min([bound for bound in bounds if bound is not None], default=None)

    def close(self, deadline: float) -> None:
        """Writes what waits, as far as the deadline allows, and closes the backend. Idempotent."""
        if self._executor is not None:
            self.writes.flush(deadline)
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        self.writes.withdraw_all("closing")
        if executor is not None:
            executor.close(deadline)

    # -- what is here ----------------------------------------------------------------------------

    def contains(self, key: StorageKey) -> bool:
        """Whether the tier holds `key` as far as is known without asking it."""
        if not self.usable or key not in self.index:
            return False
        return self.exact or self._believed.get(key, 0.0) > self._clock()

    def prefix_length(self, keys: Sequence[StorageKey], start: int, deadline: float) -> int:
        """How many of `keys` from `start` on are here without a gap; asks the store where it must."""
        if not self.usable:
            return 0
        if self.exact:
            return self.index.prefix_length(keys, start)
        position = start
        while position < len(keys) and self.contains(keys[position]):
            position += 1
        while position < len(keys):
            asked = keys[position : position + self.max_batch]
            found = self._ask(asked, deadline)
            position += found
            if found < len(asked):
                break
        return position - start

    def _ask(self, keys: Sequence[StorageKey], deadline: float) -> int:
        job = StatJob(keys, deadline=min(deadline, self._clock() + self.deadline_s))
        self.submit(job)
        job.wait(job.deadline - self._clock() + GRACE_S)
        until = self._clock() + HINT_TTL_S
        found: int = 0
        for found, (key, outcome) in enumerate(zip(keys, list(job.outcomes), strict=True)):
            if outcome is None or outcome.status is not Status.OK or key in self._rejected:
                if outcome is not None and outcome.status is Status.MISS:
                    self._disbelieve(key)
                return found
            self._believe(Resident(key, outcome.nbytes, outcome.nbytes, token=outcome.token), until)
        return found + 1 if keys else 0

    # -- frames in and out -----------------------------------------------------------------------

    def load(
        self,
        keys: Sequence[StorageKey],
        priority: Priority,
        deadline: float,
        arrived: Callable[[StorageKey, Frame | None, str], None],
    ) -> None:
        """Starts reading frames. `arrived` is called once a key, on any thread, and owns the frame given."""
        copies = []
        for key in keys:
            copy = self.index.get(key)
            if copy is None:
                arrived(key, None, "no longer there")
            else:
                copies.append(copy)

        def settled(copy: Resident, frame: Frame | None, outcome: Outcome) -> None:
            if frame is None:
                self._not_loaded(copy, outcome)
            arrived(copy.key, frame, "" if frame is not None else why(outcome))

        for batch in _batches(copies, self.max_batch, self.batch_nbytes):
            self.submit(
                LoadJob(
                    self._pool,
                    batch,
                    settled,
                    tier=self.name,
                    priority=priority,
                    deadline=deadline,
                    allocate_until=lambda: self._clock() + self._options.allocate_deadline_s,
                )
            )

    def remove(self, keys: Sequence[StorageKey], reason: str, deadline: float) -> int:
        """Deletes these copies, waiting until the deadline; pinned ones stay. Returns how many went."""
        victims = self.index.take(keys, reason)
        if not victims or not self.capabilities.delete:
            for victim in victims:
                self.index.kept(victim)
            return 0
        finished = threading.Event()
        removed: list[Resident] = []

        def note(victim: Resident, outcome: Outcome) -> None:
            if outcome.status in (Status.OK, Status.MISS):
                self.index.gone(victim)
                removed.append(victim)
            else:
                self.index.kept(victim)

        self.submit(DeleteJob(victims, note, finished.set, deadline=deadline, priority=Priority.LOAD))
        finished.wait(max(deadline - self._clock(), 0.0) + GRACE_S)
        return len(removed)

    def _not_loaded(self, copy: Resident, outcome: Outcome) -> None:
        corrupt = is_corrupt(outcome) or outcome.status is Status.TOO_SMALL
        if corrupt:
            self._emit(FrameRejected(tier=self.name, key=copy.key, reason=why(outcome)))
            with self._lock:
                self._believed.pop(copy.key, None)
                self._rejected[copy.key] = None
                if len(self._rejected) > MAX_REJECTED:
                    self._rejected.popitem(last=False)
            if not self.index.take_copy(copy, "corrupt"):
                return
            if not self.capabilities.delete:
                self.index.gone(copy)
                return
            self.submit(
                DeleteJob(
                    [copy],
                    lambda victim, _: self.index.gone(victim),
                    self.writes.pump,
                    deadline=self._clock() + self.deadline_s,
                )
            )
        elif outcome.status is Status.MISS:
            self._disbelieve(copy.key)
            self.index.remove(copy.key, "lost", token=copy.token)

    # -- what the write queue needs --------------------------------------------------------------

    @property
    def max_batch(self) -> int:
        return self.capabilities.max_batch or 64

    @property
    def max_batches(self) -> int:
        return max(1, self.capabilities.max_in_flight)

    def submit(self, job: Job) -> None:
        executor = self._executor
        if executor is not None:
            executor.submit(job)
            return
        error = BackendUnavailable("the tier is down", backend=self.name)
        for index in range(job.num_items):
            job.settled(index, Outcome(status=Status.FAILED, error=error), None)
        job.finished()

    def wrote(self, key: StorageKey) -> None:
        with self._lock:
            self._rejected.pop(key, None)
            if not self.exact:
                self._believed[key] = self._clock() + HINT_TTL_S

    # -- inside ----------------------------------------------------------------------------------

    def _lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        for key, token in copies:
            self.index.remove(key, reason, token=token)

    def _believe(self, copy: Resident, until: float) -> None:
        if copy.key not in self.index:
            self.index.admit(copy)
        with self._lock:
            self._believed[copy.key] = until
            if len(self._believed) > MAX_BELIEVED:
                now = self._clock()
                stale = [key for key, when in self._believed.items() if when <= now]
                for key in stale:
                    del self._believed[key]
            else:
                stale = []
        for key in stale:
            self.index.remove(key, "hint expired")

    def _disbelieve(self, key: StorageKey) -> None:
        with self._lock:
            self._believed.pop(key, None)
        if not self.exact:
            self.index.remove(key, "lost")

    def _went_down(self, error: BackendError) -> None:
        log.warning("tier %s is down: %s", self.name, error)
        with self._lock:
            self._reopen_at = self._clock() + self._reopen_delay_s
            self._reopen_delay_s = min(2 * self._reopen_delay_s, REOPEN_MOST_S)
        self._emit(TierDown(tier=self.name, reason=str(error)))

    def _reopen_if_due(self) -> None:
        if self._clock() < self._reopen_at:
            return
        with self._lock:
            if self._closed or self._opening or self._executor is not None:
                return
            self._opening = True
        threading.Thread(target=self._reopen, name=f"lmcache {self.name} open", daemon=True).start()

    def _reopen(self) -> None:
        try:
            self.open(self._clock() + self.deadline_s)
        except LMCacheError as error:
            self._went_down(BackendUnavailable(str(error), backend=self.name))
        finally:
            with self._lock:
                self._opening = False


def _batches(copies: Sequence[Resident], max_batch: int, batch_nbytes: int) -> list[list[Resident]]:
    batches: list[list[Resident]] = []
    nbytes = 0
    for copy in copies:
        if not batches or len(batches[-1]) >= max_batch or nbytes + copy.nbytes > batch_nbytes:
            batches.append([])
            nbytes = 0
        batches[-1].append(copy)
        nbytes += copy.nbytes
    return batches
