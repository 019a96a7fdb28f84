"""Loads that wait for their turn: every one of them is told how it ends, however long the queue."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from scripted_backend import FRAME_NBYTES, PATIENCE_S, key_of

from lmcache_core.errors import BackendUnavailable
from lmcache_core.storage import Job, Outcome, Priority, Status
from lmcache_core.tiers.index import Resident
from lmcache_core.tiers.jobs import LoadJob, Wanted
from lmcache_core.tiers.loads import LoadQueue

REFUSED = Outcome(status=Status.FAILED, error=BackendUnavailable("breaker open"))
MOST_BYTES = 4 * FRAME_NBYTES


class Store:
    """Takes what it is asked for, or refuses it at once, and knows what is in flight."""

    def __init__(self) -> None:
        self.refuses = False
        self.most_jobs = 8
        self.running: list[LoadJob] = []
        self.ended: list[tuple[str, Status]] = []
        self.most_in_flight = 0
        self.queue = LoadQueue(MOST_BYTES, lambda: self.most_jobs, self.submit, lambda: 0.0)
        self._lock = threading.Lock()  # guards `running` and `most_in_flight`

    def ask(self, number: int, priority: Priority = Priority.LOAD) -> None:
        copy = Resident(key_of(number), FRAME_NBYTES, FRAME_NBYTES)
        pool: Any = None  # no job here comes as far as taking memory
        self.queue.add(
            LoadJob(
                pool,
                [Wanted(copy, FRAME_NBYTES)],
                lambda wanted, lease, header, outcome: self.ended.append((wanted.copy.key, outcome.status)),
                tier="slow",
                priority=priority,
                deadline=1.0,
                allocate_until=lambda: 1.0,
            )
        )

    def submit(self, job: Job) -> None:
        assert isinstance(job, LoadJob)
        if self.refuses:
            self.end(job)
            return
        with self._lock:
            self.running.append(job)
            self.most_in_flight = max(self.most_in_flight, len(self.running) * FRAME_NBYTES)

    def end(self, job: LoadJob) -> None:
        job.give_up(REFUSED)
        job.finished()

    def end_one(self) -> bool:
        """Of those that run, the one that has waited longest."""
        with self._lock:
            job = self.running.pop(0) if self.running else None
        if job is not None:
            self.end(job)
        return job is not None


def test_a_long_queue_that_is_refused_at_once_ends_one_by_one() -> None:
    store = Store()
    count = 2 * sys.getrecursionlimit()
    for number in range(count):
        store.ask(number)
    assert not store.ended
    store.refuses = True
    while store.end_one():
        pass
    assert sorted(store.ended) == [(key_of(number), Status.FAILED) for number in range(count)]
    store.refuses = False
    store.ask(count)
    assert len(store.running) == 1  # no bytes are counted that nobody has


def test_nothing_is_forgotten_when_many_threads_ask_and_many_loads_end() -> None:
    store = Store()
    threads, each = 4, 200
    until = time.monotonic() + PATIENCE_S

    def ask(first: int) -> None:
        for number in range(first, first + each):
            store.ask(number)

    def end() -> None:
        while len(store.ended) < threads * each and time.monotonic() < until:
            store.end_one()

    workers = [threading.Thread(target=ask, args=(first * each,), daemon=True) for first in range(threads)]
    workers += [threading.Thread(target=end, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert sorted(store.ended) == [(key_of(number), Status.FAILED) for number in range(threads * each)]
    assert store.most_in_flight <= MOST_BYTES


def test_what_waits_past_its_deadline_ends_without_being_asked_for() -> None:
    now = [0.0]
    store = Store()
    store.queue = LoadQueue(MOST_BYTES, lambda: 8, store.submit, lambda: now[0])
    for number in range(6):
        store.ask(number)
    now[0] = 1.0
    store.queue.expire()
    assert store.ended == [(key_of(number), Status.TIMEOUT) for number in (4, 5)]
    assert len(store.running) == 4


def test_what_somebody_waits_for_goes_before_what_is_only_prefetched() -> None:
    store = Store()
    for number in range(6):
        store.ask(number, Priority.PREFETCH)
    store.ask(6)
    store.ask(7)
    assert [job.priority for job in store.running] == [Priority.PREFETCH] * 4
    while store.end_one():
        pass
    assert [key for key, _ in store.ended] == [key_of(number) for number in (0, 1, 2, 3, 6, 7, 4, 5)]


def test_no_more_loads_are_asked_for_at_once_than_may_wait() -> None:
    store = Store()
    store.most_jobs = 2
    for number in range(5):
        store.ask(number)
    assert len(store.running) == 2
    store.most_jobs = 0
    while store.end_one():
        assert len(store.running) <= 1  # one always may
    assert len(store.ended) == 5
