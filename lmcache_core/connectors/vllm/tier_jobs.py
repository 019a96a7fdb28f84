"""vLLM's transfers under way: each ends once, at its deadline at the latest, and touches nothing after."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from lmcache_core.identity import StorageKey
from lmcache_core.storage.threads import start_thread
from lmcache_core.tiers import Marks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a transfer."""

    key: bytes
    """vLLM's."""
    name: StorageKey
    first_token: int
    row: int
    """Where it lies in vLLM's memory."""


class Job:
    """One transfer between vLLM's memory, which is the job's only until it ends, and ours."""

    __slots__ = ("_lock", "_over", "chunks", "deadline", "done", "job_id", "marks", "request_id", "started")

    def __init__(
        self,
        job_id: int,
        request_id: str,
        chunks: Sequence[Chunk],
        marks: Marks,
        *,
        started: float,
        deadline: float,
    ) -> None:
        self.job_id = job_id
        self.request_id = request_id
        self.chunks = chunks
        self.marks = marks
        """When its request began: nothing used later is evicted for it."""
        self.started = started
        self.deadline = deadline
        self.done: list[bytes] = []
        """Keys whose chunk was moved, or didn't need to be. Of a load that has ended, it grows no more."""
        self._lock = threading.Lock()  # guards _over: memory is touched before it is set, or not at all
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    def touch(self, copy: Callable[[], None]) -> bool:
        """Runs `copy`, which touches vLLM's memory and waits for nothing. False, not run: it is too late."""
        with self._lock:
            if self._over:
                return False
            copy()
            return True

    def end(self) -> bool:
        """From now on the memory is vLLM's again. Waits for a `copy` that runs. True the first time."""
        with self._lock:
            first, self._over = not self._over, True
            return first

    @property
    def succeeded(self) -> bool:
        return len(self.done) == len(self.chunks)


class JobQueue:
    """Runs jobs in order on daemon threads of its own. Submitting, polling and ending are one thread's."""

    def __init__(
        self,
        name: str,
        run: Callable[[Job], None],
        *,
        num_threads: int,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run` does one job and may raise; `limit` bounds the jobs that wait or run."""
        self._name = name
        self._run = run
        self._num_threads = num_threads
        self._limit = limit
        self._clock = clock
        self._waiting: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: SimpleQueue[Job] = SimpleQueue()
        self._open: dict[int, Job] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, job: Job) -> None:
        """Takes a job; one beyond the limit fails at once."""
        self._open[job.job_id] = job
        if self._closed or len(self._open) > self._limit or not self._has_thread():
            self._end(job)
        else:
            self._waiting.put(job)

    def finished(self) -> list[Job]:
        """The jobs that have ended since the last call, those that are past their deadline included."""
        now = self._clock()
        for job in [job for job in self._open.values() if job.deadline <= now]:
            self._end(job)
        ended: list[Job] = []
        while True:
            try:
                job = self._ended.get_nowait()
            except Empty:
                return ended
            del self._open[job.job_id]
            ended.append(job)

    def end_all(self) -> None:
        """Ends every job, done or not: `finished` has them all."""
        for job in list(self._open.values()):
            self._end(job)

    def close(self, until: float) -> None:
        """Lets what was submitted finish until then, ends the rest, and the threads. Idempotent."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._waiting.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))
        self.end_all()

    def _has_thread(self) -> bool:
        if len(self._threads) < min(self._num_threads, len(self._open)):
            thread = start_thread(self._work, f"{self._name}-{len(self._threads)}")
            if thread.is_alive():
                self._threads.append(thread)
        return bool(self._threads)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                if not job.over:
                    self._run(job)
            except Exception:  # recorded boundary: the other jobs need this thread
                log.exception("%s: a transfer failed", self._name)
            self._end(job)
            del job  # keeps vLLM's keys alive otherwise, until the next one comes

    def _end(self, job: Job) -> None:
        if job.end():
            self._ended.put(job)
