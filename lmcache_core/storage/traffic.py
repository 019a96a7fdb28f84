"""Which transfers wait, which have a slot, which are stuck, and how many bytes are in flight, in one tier."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from lmcache_core.storage.call import Job
from lmcache_core.storage.job_queue import JobQueue
from lmcache_core.storage.signal import Watched
from lmcache_core.storage.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficStats:
    """Gauges of the moment."""

    queued: int
    running: int
    stuck: int
    """Running calls that were given up: their memory is quarantined."""
    in_flight_bytes: int
    threads: int


class Traffic:
    """The executor's only shared state, under one lock. It calls nobody, so the lock is never held for long.

    A transfer is live from `admit` to `finish`, and its bytes count all that time. While it has a slot a
    call of it is (or will be) inside the backend; a stuck one has been given up but not let go.
    """

    def __init__(self, *, max_in_flight: int, in_flight_bytes: int, queue_limit: int) -> None:
        self._byte_limit = in_flight_bytes
        self._queue_limit = queue_limit
        self._lock = threading.Lock()  # guards everything below, and the transfers' fields named for it
        self._work = threading.Condition(self._lock)  # threads wait: a job queued, a slot free, closed
        self._quiet = Watched(self._lock, time.monotonic)  # close waits: none is live, or all are stuck
        self._slots = max_in_flight
        self._closed = False
        self._live: dict[int, Transfer] = {}  # by id of the job
        self._queue: JobQueue[Transfer] = JobQueue()
        self._running = 0
        self._stuck = 0
        self._bytes = 0
        self._threads = 0
        self._idle = 0

    def limit_slots(self, most: int) -> None:
        """The backend takes no more than `most` calls at once."""
        with self._lock:
            self._slots = max(1, min(self._slots, most))

    def stats(self) -> TrafficStats:
        with self._lock:
            return TrafficStats(
                queued=len(self._queue),
                running=self._running,
                stuck=self._stuck,
                in_flight_bytes=self._bytes,
                threads=self._threads,
            )

    # --- a transfer's way

    def admit(self, transfer: Transfer) -> str:
        """Queues `transfer`; or says why not, and changes nothing.

        Raises:
            ValueError: its job is live already.
        """
        with self._lock:
            if id(transfer.job) in self._live:
                raise ValueError("this job was submitted before and hasn't finished")
            if self._closed:
                return "closed"
            if self._stuck >= self._slots:
                return "busy: no call returns"
            if len(self._queue) >= self._queue_limit:
                return f"busy: {len(self._queue)} jobs wait"
            if self._bytes + transfer.nbytes > self._byte_limit:
                return f"busy: {self._bytes} + {transfer.nbytes} of {self._byte_limit} bytes are in flight"
            transfer.admitted = True
            self._live[id(transfer.job)] = transfer
            self._bytes += transfer.nbytes
            self._push(transfer, front=False)
            return ""

    def requeue(self, transfer: Transfer) -> bool:
        """Moves a transfer from its slot to the front of the queue; False when it must end instead."""
        with self._lock:
            again = not (self._closed or transfer.over)
            if again:
                self._push(transfer, front=True)
            self._leave_slot(transfer)
            return again

    def next(self) -> Transfer | None:
        """The next transfer, with a slot. Blocks until there is one; None: closed, the thread shall end."""
        with self._lock:
            while True:
                if self._running < self._slots and (transfer := self._queue.pop()) is not None:
                    transfer.queued = False
                    transfer.in_slot = True
                    self._running += 1
                    return transfer
                if self._closed:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._work.wait()
                self._idle -= 1

    def leave_slot(self, transfer: Transfer) -> None:
        with self._lock:
            self._leave_slot(transfer)

    def finish(self, transfer: Transfer) -> None:
        if not transfer.admitted:  # it never will be: no lock, which in a forked child may be held for ever
            return
        with self._lock:
            del self._live[id(transfer.job)]
            self._bytes -= transfer.nbytes
            if not self._live or self._closed:
                self._quiet.changed()

    # --- taking transfers out of their way

    def withdraw(self, job: Job) -> Transfer | None:
        """Takes the transfer of `job` out of the queue; None when it isn't there."""
        with self._lock:
            transfer = self._live.get(id(job))
            if transfer is None or not transfer.queued:
                return None
            self._remove(transfer)
            return transfer

    def take_due(self, now: float) -> tuple[list[Transfer], list[Transfer], float | None]:
        """Transfers past their deadline, each once: queued (taken out), running; and the next deadline."""
        queued, running = [], []
        next_at: float | None = None
        with self._lock:
            for transfer in self._live.values():
                if transfer.over:
                    continue
                if transfer.deadline > now:
                    next_at = transfer.deadline if next_at is None else min(next_at, transfer.deadline)
                    continue
                transfer.over = True
                if transfer.queued:
                    self._remove(transfer)
                    queued.append(transfer)
                else:
                    running.append(transfer)
        return queued, running, next_at

    def mark_stuck(self, transfer: Transfer) -> None:
        """`transfer` was given up while the backend was inside; unless that has just let go, it is stuck."""
        with self._lock:
            if transfer.in_slot and not transfer.stuck:
                transfer.stuck = True
                self._stuck += 1
                self._quiet.changed()

    @property
    def hung(self) -> bool:
        """Whether every slot is stuck: nothing can run until the backend lets go of something."""
        with self._lock:
            return self._stuck >= self._slots

    def close(self) -> tuple[list[Transfer], list[Transfer]]:
        """Admits nothing from now on. Returns the queued transfers, taken out, and the running ones."""
        with self._lock:
            self._closed = True
            queued = [transfer for transfer in self._live.values() if transfer.queued]
            running = [transfer for transfer in self._live.values() if not transfer.queued]
            for transfer in queued:
                self._remove(transfer)
            self._work.notify_all()
        return queued, running

    def wait_quiet(self, timeout_s: float) -> list[Transfer]:
        """Waits until no transfer is live, and returns those that still are.

        It waits for none that is stuck: it was given up, and nobody wants what it brings.
        """
        self._quiet.wait_for(
            lambda: all(each.stuck for each in self._live.values()), time.monotonic() + timeout_s
        )
        with self._lock:
            return list(self._live.values())

    # --- threads

    @property
    def waits(self) -> bool:
        """Whether a transfer is queued: for who would keep a thread busy with something else."""
        return len(self._queue) > 0

    @property
    def wants_thread(self) -> bool:
        """Whether one more thread is of use. Without the lock it is true for a moment only, but never false
        for who has just queued a transfer that no thread will come for."""
        return self._threads < self._slots and len(self._queue) > self._idle

    def claim_thread(self, claim: list[int]) -> None:
        """Adds to `claim` the number of a thread to start now, counted from here on, where one is of use.

        Not returned but added: so Ctrl-C can't come between the count and who takes it back.
        """
        with self._lock:
            if self.wants_thread:
                self._threads += 1
                claim.append(self._threads)

    def disclaim_thread(self) -> None:
        """That thread doesn't come; what waits is left to the next."""
        with self._lock:
            self._threads -= 1

    def unclaim_thread(self) -> list[Transfer]:
        """That thread did not start. Returns the queued transfers, taken out, if there is no other."""
        with self._lock:
            self._threads -= 1
            stranded = []
            while not self._threads and (transfer := self._queue.pop()) is not None:
                transfer.queued = False
                stranded.append(transfer)
            return stranded

    # --- with the lock held

    def _push(self, transfer: Transfer, *, front: bool) -> None:
        transfer.queued = True
        self._queue.push(transfer, transfer.job.priority, front=front)
        if self._idle:
            self._work.notify()

    def _remove(self, transfer: Transfer) -> None:
        transfer.queued = False
        self._queue.remove(transfer, transfer.job.priority)

    def _leave_slot(self, transfer: Transfer) -> None:
        if transfer.in_slot:
            transfer.in_slot = False
            self._running -= 1
            self._stuck -= transfer.stuck
            transfer.stuck = False
            if self._queue and self._idle:
                self._work.notify()
