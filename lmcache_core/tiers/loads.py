"""Loads that wait for their turn: a tier is asked for no more at once than it may have in flight, or wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lmcache_core.storage import Job, Outcome, Priority, Status
from lmcache_core.tiers.jobs import LoadJob

LATE = Outcome(status=Status.TIMEOUT)


class LoadQueue:
    """Holds loads back instead of having them refused as busy. Thread-safe; never blocks. Only for threads
    that Ctrl-C doesn't come to.

    The more urgent go first, then those that came first. A job and its bytes count until the backend has let
    go of them, so a hung store fills the bounds; what waits then ends at its deadline, at the latest when the
    next request comes.
    """

    def __init__(
        self,
        most_bytes: int,
        most_jobs: Callable[[], int],
        submit: Callable[[Job], None],
        clock: Callable[[], float],
    ) -> None:
        self._most_bytes = most_bytes
        self._most_jobs = most_jobs
        self._submit = submit
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._waiting: tuple[deque[LoadJob], ...] = tuple(deque() for _ in Priority)
        self._bytes = 0
        self._jobs = 0
        self._advancing = False

    def add(self, job: LoadJob) -> None:
        job.on_finished(lambda: self._finished(job.nbytes))
        with self._lock:
            self._waiting[job.priority].append(job)
        self._advance()

    def expire(self) -> None:
        """Ends what has waited past its deadline."""
        now = self._clock()
        late: list[LoadJob] = []
        with self._lock:
            for waiting in self._waiting:
                jobs = list(waiting)
                waiting.clear()
                for job in jobs:
                    (late if job.deadline <= now else waiting).append(job)
        for job in late:
            job.give_up(LATE)

    def _finished(self, nbytes: int) -> None:
        with self._lock:
            self._bytes -= nbytes
            self._jobs -= 1
        self._advance()

    def _advance(self) -> None:
        """Submits what may go. One thread does; the others leave it to it, and so does a job that is refused
        and finished while it is submitted: one inside the other, a long queue would exhaust the stack."""
        with self._lock:
            if self._advancing:
                return
            self._advancing = True
        try:
            while (job := self._next()) is not None:
                self._submit(job)
        except BaseException:
            self._advancing = False
            raise

    def _next(self) -> LoadJob | None:
        """The next that may go, its bytes counted; None: none may, and the advance is over."""
        with self._lock:
            waiting = next(filter(None, self._waiting), None)
            if waiting and (not self._jobs or self._fits(waiting[0])):
                job = waiting.popleft()
                self._bytes += job.nbytes
                self._jobs += 1
                return job
            self._advancing = False
            return None

    def _fits(self, job: LoadJob) -> bool:
        return self._bytes + job.nbytes <= self._most_bytes and self._jobs < self._most_jobs()
