"""Which flights wait, which have a slot, which are stuck, and how many bytes are in flight, in one tier."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lmcache_core.storage.call import Job
from lmcache_core.storage.flight import Flight
from lmcache_core.storage.job_queue import JobQueue


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

    A flight is live from `admit` to `finish`, and its bytes count all that time. While it has a slot a
    call of it is (or will be) inside the backend; a stuck one has been given up but not let go.
    """

    def __init__(self, *, max_in_flight: int, in_flight_bytes: int, queue_limit: int) -> None:
        self._byte_limit = in_flight_bytes
        self._queue_limit = queue_limit
        self._lock = threading.Lock()  # guards everything below, and the flights' fields named for it
        self._work = threading.Condition(self._lock)  # threads wait: a job queued, a slot free, closed
        self._quiet = threading.Condition(self._lock)  # close waits: no flight is live
        self._slots = max_in_flight
        self._closed = False
        self._live: dict[int, Flight] = {}  # by id of the job
        self._queue: JobQueue[Flight] = JobQueue()
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

    # --- a flight's way

    def admit(self, flight: Flight) -> str:
        """Queues `flight`; or says why not, and changes nothing.

        Raises:
            ValueError: its job is live already.
        """
        with self._lock:
            if id(flight.job) in self._live:
                raise ValueError("this job was submitted before and hasn't finished")
            if self._closed:
                return "closed"
            if self._stuck >= self._slots:
                return "busy: no call returns"
            if len(self._queue) >= self._queue_limit:
                return f"busy: {len(self._queue)} jobs wait"
            if self._bytes + flight.nbytes > self._byte_limit:
                return f"busy: {self._bytes} + {flight.nbytes} of {self._byte_limit} bytes are in flight"
            flight.admitted = True
            self._live[id(flight.job)] = flight
            self._bytes += flight.nbytes
            self._push(flight, front=False)
            return ""

    def requeue(self, flight: Flight) -> bool:
        """Moves a flight from its slot to the front of the queue; False when it must end instead."""
        with self._lock:
            again = not (self._closed or flight.over)
            if again:
                self._push(flight, front=True)
            self._leave_slot(flight)
            return again

    def next(self) -> Flight | None:
        """The next flight, with a slot. Blocks until there is one; None: closed, the thread shall end."""
        with self._lock:
            while True:
                if self._running < self._slots and (flight := self._queue.pop()) is not None:
                    flight.queued = False
                    flight.in_slot = True
                    self._running += 1
                    return flight
                if self._closed:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._work.wait()
                self._idle -= 1

    def leave_slot(self, flight: Flight) -> None:
        with self._lock:
            self._leave_slot(flight)

    def finish(self, flight: Flight) -> None:
        with self._lock:
            if flight.admitted:
                del self._live[id(flight.job)]
                self._bytes -= flight.nbytes
                if not self._live:
                    self._quiet.notify_all()

    # --- taking flights out of their way

    def withdraw(self, job: Job) -> Flight | None:
        """Takes the flight of `job` out of the queue; None when it isn't there."""
        with self._lock:
            flight = self._live.get(id(job))
            if flight is None or not flight.queued:
                return None
            self._remove(flight)
            return flight

    def take_due(self, now: float) -> tuple[list[Flight], list[Flight], float | None]:
        """Flights past their deadline, each once: queued (taken out) and running ones; the next deadline."""
        queued, running = [], []
        next_at: float | None = None
        with self._lock:
            for flight in self._live.values():
                if flight.over:
                    continue
                if flight.deadline > now:
                    next_at = flight.deadline if next_at is None else min(next_at, flight.deadline)
                    continue
                flight.over = True
                if flight.queued:
                    self._remove(flight)
                    queued.append(flight)
                else:
                    running.append(flight)
        return queued, running, next_at

    def mark_stuck(self, flight: Flight) -> None:
        """`flight` was given up while the backend was inside; unless that has just let go, it is stuck."""
        with self._lock:
            if flight.in_slot and not flight.stuck:
                flight.stuck = True
                self._stuck += 1

    @property
    def hung(self) -> bool:
        """Whether every slot is stuck: nothing can run until the backend lets go of something."""
        with self._lock:
            return self._stuck >= self._slots

    def close(self) -> tuple[list[Flight], list[Flight]]:
        """Admits nothing from now on. Returns the queued flights, taken out, and the running ones."""
        with self._lock:
            self._closed = True
            queued = [flight for flight in self._live.values() if flight.queued]
            running = [flight for flight in self._live.values() if not flight.queued]
            for flight in queued:
                self._remove(flight)
            self._work.notify_all()
        return queued, running

    def wait_quiet(self, timeout_s: float) -> list[Flight]:
        """Waits until no flight is live, and returns those that still are."""
        with self._lock:
            self._quiet.wait_for(lambda: not self._live, max(timeout_s, 0.0))
            return list(self._live.values())

    # --- threads

    def claim_thread(self) -> int | None:
        """The number of a thread to start now, counted from here on; None when those there are will do."""
        with self._lock:
            if self._threads >= self._slots or len(self._queue) <= self._idle:
                return None
            self._threads += 1
            return self._threads

    def unclaim_thread(self) -> list[Flight]:
        """That thread did not start. Returns the queued flights, taken out, if there is no other."""
        with self._lock:
            self._threads -= 1
            stranded = []
            while not self._threads and (flight := self._queue.pop()) is not None:
                flight.queued = False
                stranded.append(flight)
            return stranded

    # --- with the lock held

    def _push(self, flight: Flight, *, front: bool) -> None:
        flight.queued = True
        self._queue.push(flight, flight.job.priority, front=front)
        if self._idle:
            self._work.notify()

    def _remove(self, flight: Flight) -> None:
        flight.queued = False
        self._queue.remove(flight, flight.job.priority)

    def _leave_slot(self, flight: Flight) -> None:
        if flight.in_slot:
            flight.in_slot = False
            self._running -= 1
            self._stuck -= flight.stuck
            flight.stuck = False
            if self._queue and self._idle:
                self._work.notify()
