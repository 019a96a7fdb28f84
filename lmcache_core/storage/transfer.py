"""One job inside an executor: the state of each of its items, and who still holds its memory.

An item:

    WAITING ──done──▶ CHECKING ──────────▶ ENDED     settled with what the backend said
       │                  └──▶ HELD_BACK ──▶ ENDED   failed; settled once no retry is to be made
       │                           └──▶ WAITING      retried
       └──deadline, close──▶ ABANDONED ──▶ ENDED     settled by the core; the backend lets go later

A deadline or close also ends CHECKING and HELD_BACK. An item is settled exactly on its way into
ABANDONED or ENDED, whichever comes first; in ABANDONED its memory is quarantined.

Memory is free when two counts are zero. An attempt is over when its method has returned and the backend
has let go of each of its items. A transfer is finished when nobody holds it: not the executor (until the
last attempt is over), no check that reads its memory, no thread that is reporting an item.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Protocol, TypeVarTuple

from lmcache_core.errors import BackendError, Corrupt, DeadlineExceeded, PoolFull
from lmcache_core.frame import FrameHeader
from lmcache_core.storage.attempt import Attempt, Target
from lmcache_core.storage.call import Job, Operation
from lmcache_core.storage.checks import check_frame, examine, must_verify
from lmcache_core.storage.contract import Item, Outcome, Status
from lmcache_core.storage.faults import failed, is_interrupt, wrapped

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")

_NO_ROOM = Outcome(status=Status.FULL)


class ItemState(Enum):
    WAITING = "waiting"
    """Queued, or the backend has it."""
    CHECKING = "checking"
    """The backend has let go; its outcome is being judged."""
    HELD_BACK = "held back"
    """Failed in a way that may be retried once the attempt is over."""
    ABANDONED = "abandoned"
    """Settled by the core; the backend still has it."""
    ENDED = "ended"
    """Settled, and the backend has let go."""


class TransferOwner(Protocol):
    """What a transfer needs of its executor. Never called with the transfer's lock held."""

    @property
    def tier(self) -> str: ...

    def now(self) -> float: ...

    def count(self, what: str) -> None: ...

    def interrupted(self, error: BaseException) -> None: ...

    def verify(self, check: Callable[[], None]) -> None: ...

    @property
    def is_waited_for(self) -> bool: ...

    def attempt_over(self, transfer: Transfer, attempt: Attempt) -> None: ...

    def transfer_finished(self, transfer: Transfer) -> None: ...


class Transfer:
    """One job between `submit` and `finished`. Every method may be called on any thread."""

    def __init__(self, job: Job, owner: TransferOwner) -> None:
        self.job = job
        self.operation: Operation = job.operation
        self.deadline = job.deadline
        self.nbytes = job.nbytes
        self._owner = owner
        # Guarded by the executor's lock.
        self.admitted = False
        self.queued = False
        self.in_slot = False
        self.stuck = False  # still in its slot after it was given up
        self.over = False  # its deadline has been dealt with
        # Guarded by _lock; `cancelled` and `retried` only ever turn true and are read without it.
        self._lock = threading.Lock()
        self._states = [ItemState.WAITING] * job.num_items
        self._holders = 1  # the executor
        self._batch: Sequence[Target] | None = None
        self._preparing = False
        self._given_up: Outcome | None = None  # what it was given up with while preparing
        self._attempt: Attempt | None = None
        self._held_back: dict[int, Outcome] = {}
        self._giving_up: set[int] = set()  # items whose `settled` is about to be called, or running
        self._too_early: dict[int, Outcome] = {}  # what landed for those: told after `settled`
        self.cancelled = False
        self.retried = False

    # --- dispatch

    def prepare(self) -> bool:
        """Lets the job take its memory, once; False when nothing is left to ask the backend for."""
        if self._batch is not None:
            return True
        with self._lock:
            if self.cancelled:
                return False
            self._preparing = True
        batch: Sequence[Target] = ()
        rest = _NO_ROOM
        try:
            batch = self.job.prepare()
            if len(batch) > self.job.num_items:
                raise BackendError(f"{len(batch)} items were prepared of {self.job.num_items}")
        except PoolFull:
            pass
        except BaseException as error:  # noqa: BLE001  (recorded boundary: a worker outlives any job)
            batch, rest = (), failed(wrapped(error, tier=self._owner.tier, op=self.operation.value))
        with self._lock:
            self._preparing = False
            self._batch = batch
            given_up = self._given_up
        if given_up is not None:
            self.give_up(given_up)
            return False
        if len(batch) < self.job.num_items:
            self._settle_from(len(batch), rest)
        return len(batch) > 0

    def begin(self, started: float) -> Attempt | None:
        """The call for the items to ask for now; None when the transfer was given up meanwhile."""
        with self._lock:
            if self.cancelled or not self._batch:
                return None
            indices: Sequence[int] = range(len(self._batch))
            targets = self._batch
            if self._held_back:
                indices = sorted(self._held_back)
                targets = [self._batch[index] for index in indices]
                for index in indices:
                    self._states[index] = ItemState.WAITING
                self._held_back = {}
                self.retried = True
            self._attempt = Attempt(self, indices, targets, started)
            return self._attempt

    def returned(self, attempt: Attempt, error: BackendError | None, *, asynchronous: bool) -> None:
        """The backend's method returned, or raised `error`. Unless asynchronous, that ends every item."""
        unsettled: list[int] = []
        abandoned: list[int] = []
        with self._lock:
            attempt.inside = False
            last, attempt.last_read = attempt.last_read, None
        if error is not None or not asynchronous:
            with self._lock:
                if attempt.open > 1:
                    for index in attempt.indices:
                        if self._states[index] is ItemState.WAITING:
                            self._states[index] = ItemState.CHECKING
                            unsettled.append(index)
                        elif self._states[index] is ItemState.ABANDONED:
                            self._states[index] = ItemState.ENDED
                            abandoned.append(index)
        if unsettled or abandoned:
            if error is None:
                self.breach(f"returned with {len(unsettled) + len(abandoned)} items unsettled")
                error = BackendError(
                    "the backend returned without settling this item",
                    backend=self._owner.tier,
                    op=self.operation.value,
                )
            outcome = self._timely(failed(error))
            self._note(attempt, outcome)
            for index in unsettled:
                self._conclude(index, outcome, None, retryable=True)
            for index in abandoned:
                self._land(index, outcome)
        if last is not None:
            if self._owner.is_waited_for:
                self._owner.verify(partial(self._verify, *last))
            else:
                self._verify(*last)
        self._let_go(attempt, 1 + len(unsettled) + len(abandoned))

    # --- the backend's call

    def remaining(self) -> float:
        left = self.deadline - self._owner.now()
        if left <= 0 or self.cancelled:
            reason = "the deadline has passed" if left <= 0 else "the call was cancelled"
            raise DeadlineExceeded(reason, backend=self._owner.tier, op=self.operation.value)
        return left

    def breach(self, what: str) -> None:
        """Counts and logs that the backend broke the contract."""
        self._owner.count("contract_breaches")
        log.warning("tier %s: a %s broke the contract: %s", self._owner.tier, self.operation.value, what)

    def item_done(self, attempt: Attempt, position: int, outcome: Outcome) -> None:
        """The backend settles an item: in time, late, or once too often."""
        index = attempt.indices[position]
        with self._lock:
            state = self._states[index] if self._attempt is attempt else ItemState.ENDED
            waiting = state is ItemState.WAITING
            if not waiting and state is not ItemState.ABANDONED:
                state = ItemState.ENDED
            else:
                self._states[index] = ItemState.CHECKING if waiting else ItemState.ENDED
                target = attempt.targets[position]
        if state is ItemState.ENDED:
            self._owner.count("repeated_settlements")
            return
        try:
            believed, fault = examine(self.operation, target, outcome, tier=self._owner.tier)
        except BaseException as error:  # noqa: BLE001  (recorded boundary: a foreign error's own code)
            fault = f"the outcome can't be looked at: {type(error).__name__}"
            believed = failed(BackendError(fault, backend=self._owner.tier, op=self.operation.value))
        if fault:
            self.breach(fault)
        if believed.error is not None:
            believed = self._timely(believed)
        if not waiting:
            self._land(index, believed)
        else:
            self._note(attempt, believed)
            if believed.status is Status.OK and isinstance(target, Item) and self.operation is Operation.GET:
                self._read(attempt, index, target, believed)
            else:
                self._conclude(index, believed, None, retryable=True)
        self._let_go(attempt, 1)

    # --- the executor's side

    def give_up(self, outcome: Outcome) -> bool:
        """Settles every unsettled item with `outcome`; True when the backend is still inside or holds some.

        While the job prepares, nothing is settled: `prepare` does it when it ends.
        """
        with self._lock:
            self.cancelled = True
            if self._preparing:
                self._given_up = outcome
                return False
        return self._settle_from(0, outcome)

    def cancel_call(self) -> None:
        """Tells the backend, through its call, to stop. Settles nothing."""
        self.cancelled = True

    def settle_held_back(self) -> None:
        """Settles the items that waited for a retry with the failure each of them had."""
        with self._lock:
            held_back, self._held_back = self._held_back, {}
            for index in held_back:
                self._states[index] = ItemState.ENDED
        for index, outcome in held_back.items():
            self._report(index, outcome, None)

    @property
    def wants_retry(self) -> bool:
        return bool(self._held_back) and not self.cancelled

    def release(self) -> None:
        """One holder less; the last one finishes the transfer."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            self._batch = ()  # whoever keeps this object keeps no views
        self._guarded(self.job.finished)
        self._owner.transfer_finished(self)

    # --- inside

    def _settle_from(self, start: int, outcome: Outcome) -> bool:
        """Settles what is unsettled from item `start` on; True when the backend holds any, or is inside.

        It may be inside having let go of every item: its method doesn't return.
        """
        settled: list[int] = []
        with self._lock:
            attempt = self._attempt
            held = attempt is not None and attempt.inside
            for index in range(start, len(self._states)):
                state = self._states[index]
                if state is ItemState.WAITING and attempt is not None:
                    self._states[index] = ItemState.ABANDONED
                    held = True
                elif state is ItemState.ABANDONED or state is ItemState.ENDED:
                    continue
                else:
                    self._states[index] = ItemState.ENDED
                    self._held_back.pop(index, None)
                settled.append(index)
            if held and attempt is not None:
                attempt.judged = True  # the executor tells the breaker, now
            if not settled:
                return held  # it may even be finished: holding it now would finish it again
            self._holders += 1
            self._giving_up.update(settled)
        for index in settled:
            self._report(index, outcome, None)
            with self._lock:
                self._giving_up.remove(index)
                landed = self._too_early.pop(index, None)
            if landed is not None:
                self._land(index, landed)
        self.release()
        return held

    def _read(self, attempt: Attempt, index: int, item: Item, outcome: Outcome) -> None:
        """A GET brought bytes: they are verified, unless only the caller can.

        On another thread, while the next item is being read. Behind the last one nothing is: it is
        verified where the method returns, without waking a thread for it.
        """
        if not must_verify(item):
            self._conclude(index, outcome, None)
            return
        with self._lock:
            self._holders += 1
            last = attempt.inside and attempt.open == 2  # this item, and the method
            if last:
                attempt.last_read = index, item, outcome
        if not last:
            self._owner.verify(partial(self._verify, index, item, outcome))

    def _verify(self, index: int, item: Item, outcome: Outcome) -> None:
        header: FrameHeader | None = None
        try:
            header = check_frame(item, outcome.nbytes)
        except Corrupt as error:
            self._owner.count("corrupt_frames")
            outcome = failed(wrapped(error, tier=self._owner.tier, op="get", key=item.key))
        except BaseException as error:  # recorded boundary: whatever it was, the item has to be settled
            log.exception("tier %s: verifying %s failed", self._owner.tier, item.key)
            outcome = failed(wrapped(error, tier=self._owner.tier, op="get", key=item.key))
        self._conclude(index, outcome, header)
        self.release()

    def _conclude(
        self, index: int, outcome: Outcome, header: FrameHeader | None, *, retryable: bool = False
    ) -> None:
        """Settles an item in CHECKING, or holds it back; one that the core has settled by now has landed."""
        with self._lock:
            checking = self._states[index] is ItemState.CHECKING
            if checking:
                error = outcome.error
                retryable = retryable and not (self.retried or self.cancelled)
                if retryable and error is not None and error.retryable:
                    self._states[index] = ItemState.HELD_BACK
                    self._held_back[index] = outcome
                    return
                self._states[index] = ItemState.ENDED
        if checking:
            self._report(index, outcome, header)
        else:
            self._land(index, outcome)

    def _report(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        self._guarded(self.job.settled, index, outcome, header)

    def _land(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            if index in self._giving_up:
                self._too_early[index] = outcome
                return
        self._owner.count("late_results")
        if self.operation.writes:
            self._guarded(self.job.landed, index, outcome)

    def _timely(self, outcome: Outcome) -> Outcome:
        """A backend that gives up at the deadline says what the core is about to say: TIMEOUT."""
        if isinstance(outcome.error, DeadlineExceeded) and self._owner.now() >= self.deadline:
            return Outcome(status=Status.TIMEOUT, error=outcome.error)
        return outcome

    def _note(self, attempt: Attempt, outcome: Outcome) -> None:
        """Keeps what the breaker will be told. A corrupt copy is an answer: the store works."""
        if outcome.error is None or isinstance(outcome.error, Corrupt):
            attempt.answered = True
        else:
            attempt.failure = str(outcome.error)
            attempt.timed_out |= outcome.status is Status.TIMEOUT

    def _let_go(self, attempt: Attempt, count: int) -> None:
        with self._lock:
            attempt.open -= count
            if attempt.open:
                return
            attempt.targets = ()  # a driver may keep its call for long
            self._attempt = None
        self._owner.attempt_over(self, attempt)

    def _guarded(self, callback: Callable[[*Args], None], *args: *Args) -> None:
        try:
            callback(*args)
        except BaseException as error:  # recorded boundary: the other items' callbacks have to run too
            if is_interrupt(error):
                self._owner.interrupted(error)
                return
            self._owner.count("callback_errors")
            log.exception("tier %s: a callback of a %s job raised", self._owner.tier, self.operation.value)
