"""One tier's executor: its threads, its deadlines, and every call into its backend.

A job:

    submit ──▶ queued ──▶ running ──▶ settled ──▶ finished
       │          │           └──deadline, close──▶ settled by the core; stuck: the slot is taken and the
       │          │                                 memory quarantined until the backend lets go ──▶ finished
       │          └──deadline, cancel, close──▶ settled, finished; it never held memory
       └──closed, busy, breaker open──▶ settled, finished; nothing was asked

- A running job has one of the slots, as many as calls may be inside the backend. It is free again when
  the method has returned and the backend has let go of every item, however late that is.
- Bytes count from submit to finished, so queued, running and quarantined ones all stand in the bound.
- A job with items that failed in a way worth retrying goes through queued and running once more.
- A forked child has no worker threads, and the backend is its parent's: every job is refused at once there,
  without a lock that a thread of the parent may have held.

`transfer.py` has the states of a job's items, `traffic.py` the queue, slots and bytes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lmcache_core.errors import (
    BackendClosed,
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    NotSupported,
)
from lmcache_core.events import EventBus
from lmcache_core.storage.alarm import Alarm
from lmcache_core.storage.attempt import Attempt
from lmcache_core.storage.breaker import Breaker, BreakerState
from lmcache_core.storage.call import Job, Operation
from lmcache_core.storage.contract import Backend, BackendStats, C, Capabilities, Entry, Host, Outcome, Status
from lmcache_core.storage.crew import Crew
from lmcache_core.storage.faults import failed, is_interrupt, wrapped
from lmcache_core.storage.health import Health
from lmcache_core.storage.lifecycle import close_backend, open_backend
from lmcache_core.storage.retry import RetryBudget
from lmcache_core.storage.scan import ScanJob
from lmcache_core.storage.traffic import Traffic, TrafficStats
from lmcache_core.storage.transfer import Transfer
from lmcache_core.storage.verifier import Verifier

log = logging.getLogger(__name__)

SCAN_GRACE_S = 1.0


class _State(Enum):
    BUILT = "not open yet"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStats:
    """Gauges of the moment, and counters since the start.

    Counters: `submitted`, `refused`, `timeouts` and `retries` in jobs; `calls`; `late_results`,
    `corrupt_frames` and `repeated_settlements` in items; `contract_breaches`; `callback_errors`.
    """

    traffic: TrafficStats
    read_breaker: BreakerState
    write_breaker: BreakerState
    counters: dict[str, int]


class TierExecutor:
    """Runs jobs on a backend. Thread-safe; no method but `open`, `scan` and `close` blocks.

    `max_in_flight`, the backend's own limit and the jobs' deadlines bound what a bad store can cost.
    `queue_limit` counts jobs, `in_flight_bytes` the `nbytes` of all that aren't finished.
    """

    def __init__(
        self,
        backend: Backend[C],
        host: Host,
        *,
        max_in_flight: int,
        in_flight_bytes: int,
        queue_limit: int,
        read_breaker: Breaker,
        write_breaker: Breaker,
        retry: RetryBudget,
        verifier: Verifier,
        events: EventBus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = host.tier
        self.now = clock
        self.verify = verifier.submit
        self._backend = backend
        self._host = host
        self._health = Health(host.tier, read_breaker, write_breaker, retry, events, self.interrupted)
        self._alarm = Alarm(self.expire, clock)
        self._capabilities = Capabilities()
        self._methods: dict[Operation, Callable[..., None]] = {
            Operation.GET: backend.get_many,
            Operation.PUT: backend.put_many,
            Operation.STAT: backend.stat_many,
            Operation.DELETE: backend.delete_many,
        }
        self._traffic = Traffic(
            max_in_flight=max_in_flight, in_flight_bytes=in_flight_bytes, queue_limit=queue_limit
        )
        self._crew = Crew(host.tier, self._traffic, self._run)
        self._pid = os.getpid()
        self._life = threading.Lock()  # guards changes of _state
        self._state = _State.BUILT
        self._counting = threading.Lock()  # guards _counters
        self._counters: Counter[str] = Counter()
        self._interrupt: BaseException | None = None  # the main thread's alone

    # --- for the tier layer

    @property
    def capabilities(self) -> Capabilities:
        """What the backend offers, once it is open."""
        return self._capabilities

    def open(self, deadline: float) -> Capabilities:
        """Opens the backend and returns what it offers. After a failure the executor is closed for good.

        Raises:
            ConfigError, PermissionDenied, BackendUnavailable: as the backend said.
            BackendUnavailable: it didn't return before `deadline`.
            PluginError: it offers more than it declared.
            BackendError: it raised anything else.
        """
        with self._life:
            if self._state is not _State.BUILT:
                raise BackendClosed(f"can't be opened: {self._state.value}", backend=self.tier, op="open")
            self._state = _State.OPENING
        try:
            self._alarm.start(f"lmcache-deadlines-{self.tier}")
            capabilities = open_backend(self._backend, self._host, deadline - self.now())
        except BaseException as error:
            self._state = _State.CLOSED
            self._alarm.stop()
            if isinstance(error, RuntimeError):  # of this process: what the backend raised is ours by now
                raise BackendUnavailable("no thread can be started", backend=self.tier, op="open") from error
            raise
        self._capabilities = capabilities
        self._traffic.limit_slots(capabilities.max_in_flight)
        with self._life:
            opened = self._state is _State.OPENING
            if opened:
                self._state = _State.OPEN
        if not opened:
            close_backend(self._backend, self.tier, deadline - self.now())
            raise BackendClosed("closed while it opened", backend=self.tier, op="open")
        return capabilities

    def submit(self, job: Job) -> None:
        """Queues `job`. When that can't be, it is settled FAILED and finished at once, on this thread.

        Raises:
            ValueError: the same job was submitted before and hasn't finished.
        """
        transfer = Transfer(job, self)
        if os.getpid() != self._pid:
            self._drop(transfer, self._failed(BackendClosed, "used in a forked process", transfer))
            self._pass_on_interrupt()
            return
        refusal = self._refusal(transfer)
        try:
            if refusal is None and (busy := self._traffic.admit(transfer)):
                refusal = self._error(BackendUnavailable, busy, transfer)
        finally:
            if transfer.admitted:  # even when Ctrl-C comes right behind
                self._alarm.at(transfer.deadline)
                self._staff()
        self.count("submitted" if refusal is None else "refused")
        if refusal is not None:
            self._drop(transfer, failed(refusal))
        self._pass_on_interrupt()

    def cancel(self, job: Job) -> bool:
        """Takes `job` out of the queue and settles it FAILED; False when it isn't queued (any more)."""
        transfer = self._traffic.withdraw(job)
        if transfer is None:
            return False
        self._drop(transfer, self._failed(BackendError, "cancelled before it ran", transfer))
        self._pass_on_interrupt()
        return True

    def scan(self, prefix: str, deadline: float) -> list[Entry]:
        """Every entry whose key starts with `prefix`. Blocks, until `deadline` at most.

        Raises:
            NotSupported: the backend doesn't scan.
            BackendError: it failed, was refused as any job may be, or took too long.
        """
        job = ScanJob(self._backend.scan, prefix, deadline=deadline)
        self.submit(job)
        return job.result(deadline - self.now() + SCAN_GRACE_S)

    def expire(self) -> None:
        """Settles as TIMEOUT what is past its deadline. The alarm calls it, or a test with a fake clock."""
        queued, running, next_at = self._traffic.take_due(self.now())
        if next_at is not None:
            self._alarm.at(next_at)
        for transfer in running:
            self.count("timeouts")
            if transfer.give_up(self._timeout(transfer)):
                self._traffic.mark_stuck(transfer)
                self._health.of(transfer.operation).failure("a call did not end within its deadline")
        hung = self._traffic.hung
        for transfer in queued:
            self.count("timeouts")
            if hung:  # waiting for calls that never return is a failure of the store; for slow ones it isn't
                self._health.of(transfer.operation).failure("no call returns")
            self._drop(transfer, self._timeout(transfer))

    def close(self, deadline: float) -> None:
        """Closes the backend. When this returns, at `deadline` at most, every item is settled. Idempotent.

        Queued jobs fail at once and running calls are told to stop. One that hangs on keeps its memory; past
        its own deadline it is not waited for.
        A job that is preparing settles when it has prepared. In a forked child nothing happens.
        """
        if os.getpid() != self._pid:
            return
        try:
            with self._life:
                if self._state is _State.CLOSED:
                    return
                self._state = _State.CLOSED
            self._end(deadline)
        except BaseException:  # Ctrl-C: it waits no longer, but ends the rest
            self._end(self.now())
            raise
        self._pass_on_interrupt()

    def _end(self, deadline: float) -> None:
        self._state = _State.CLOSED
        queued, running = self._traffic.close()
        for transfer in queued:
            self._drop(transfer, self._failed(BackendClosed, "closed", transfer))
        for transfer in running:
            transfer.cancel_call()
        close_backend(self._backend, self.tier, deadline - self.now())
        for transfer in self._traffic.wait_quiet(deadline - self.now()):
            if transfer.give_up(self._failed(BackendClosed, "closed while it ran", transfer)):
                self._traffic.mark_stuck(transfer)
        self._alarm.stop()

    def stats(self) -> ExecutorStats:
        with self._counting:
            counters = dict(self._counters)
        return ExecutorStats(
            traffic=self._traffic.stats(),
            read_breaker=self._health.read_breaker.state,
            write_breaker=self._health.write_breaker.state,
            counters=counters,
        )

    @property
    def refuses_reads(self) -> bool:
        """The read breaker is open, and its cool-down not over."""
        return self._health.read_breaker.refusing

    def backend_stats(self) -> BackendStats:
        """The backend's own counters; empty ones where it fails to tell."""
        try:
            stats = self._backend.stats()
        except BaseException as error:  # recorded boundary: plugins are foreign code
            if is_interrupt(error):
                raise
            log.exception("tier %s: stats failed", self.tier)
            return BackendStats()
        return stats if isinstance(stats, BackendStats) else BackendStats()

    # --- for its transfers

    def count(self, what: str) -> None:
        with self._counting:
            self._counters[what] += 1

    def interrupted(self, error: BaseException) -> None:
        """Ctrl-C came inside a callback. It is raised on, but not before the other items had theirs."""
        self._interrupt = error

    @property
    def is_waited_for(self) -> bool:
        """Whether a job waits for a worker, which then leaves to another thread what it can."""
        return self._traffic.waits

    def attempt_over(self, transfer: Transfer, attempt: Attempt) -> None:
        """The backend has let go of the whole call: its slot is free, and a retry may follow."""
        health, operation = self._health, transfer.operation
        health.judge(operation, attempt, closing=self._state is _State.CLOSED)
        if (
            transfer.wants_retry
            and health.can_retry(operation, attempt, transfer.deadline, self.now())
            and self._traffic.requeue(transfer)
        ):
            self.count("retries")
            self._staff()
            return
        self._traffic.leave_slot(transfer)
        transfer.settle_held_back()
        transfer.release()

    def transfer_finished(self, transfer: Transfer) -> None:
        self._traffic.finish(transfer)

    # --- the worker threads

    def _staff(self) -> None:
        for transfer in self._crew.call_in():
            self._drop(transfer, self._failed(BackendUnavailable, "no thread can be started", transfer))

    def _run(self, transfer: Transfer) -> None:
        """Runs one attempt of `transfer` on this thread."""
        attempt = self._begin(transfer)
        if attempt is None:
            self._traffic.leave_slot(transfer)
            transfer.release()
            return
        error: BackendError | None = None
        try:
            if transfer.operation is Operation.SCAN and isinstance(transfer.job, ScanJob):
                transfer.job.read_pages(attempt)
            else:
                self._methods[transfer.operation](list(attempt.targets), attempt)  # a copy: it may change it
        except BaseException as raised:  # noqa: BLE001  (recorded boundary)
            closing = self._state is _State.CLOSED
            error = wrapped(raised, tier=self.tier, op=transfer.operation.value, closing=closing)
        transfer.returned(attempt, error, asynchronous=self._capabilities.asynchronous)

    def _begin(self, transfer: Transfer) -> Attempt | None:
        """Prepares `transfer` and begins its next attempt; None: every item has been settled instead."""
        breaker = self._health.of(transfer.operation)
        if transfer.deadline <= self.now():
            outcome = self._timeout(transfer)
        elif breaker.refusing or (transfer.prepare() and not breaker.allow()):
            outcome = self._failed(BackendUnavailable, "breaker open", transfer)
        else:
            attempt = transfer.begin(self.now())
            if attempt is not None:
                self._health.retry.record_call()
                self.count("calls")
                return attempt
            outcome = self._failed(BackendClosed, "closed", transfer)  # unless its items are settled already
        transfer.settle_held_back()
        transfer.give_up(outcome)
        return None

    # --- refusals and words

    def _refusal(self, transfer: Transfer) -> BackendError | None:
        """Why `transfer` need not even be queued, if so."""
        if self._state is _State.CLOSED:
            return self._error(BackendClosed, "closed", transfer)
        if self._state is not _State.OPEN:
            return self._error(BackendUnavailable, self._state.value, transfer)
        operation, offers = transfer.operation, self._capabilities
        lacks_delete = operation is Operation.DELETE and not offers.delete
        if lacks_delete or (operation is Operation.SCAN and not offers.scan):
            return self._error(NotSupported, f"this backend has no {operation.value}", transfer)
        if self._health.of(operation).refusing:
            return self._error(BackendUnavailable, "breaker open", transfer)
        return None

    def _drop(self, transfer: Transfer, outcome: Outcome) -> None:
        """Ends a transfer that the backend does not have: settles what is left and finishes it."""
        transfer.settle_held_back()
        transfer.give_up(outcome)
        transfer.release()

    def _pass_on_interrupt(self) -> None:
        """Raises the Ctrl-C that came inside a callback of this call, now that all is as without it."""
        error = self._interrupt
        if error is not None and is_interrupt(error):
            self._interrupt = None
            raise error

    def _error(self, kind: type[BackendError], message: str, transfer: Transfer) -> BackendError:
        return kind(message, backend=self.tier, op=transfer.operation.value)

    def _failed(self, kind: type[BackendError], message: str, transfer: Transfer) -> Outcome:
        return failed(self._error(kind, message, transfer))

    def _timeout(self, transfer: Transfer) -> Outcome:
        error = self._error(DeadlineExceeded, "no answer within the deadline", transfer)
        return Outcome(status=Status.TIMEOUT, error=error)
