"""Scenarios for the tier executor: jobs that check their own rules, and a clock to turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from scripted_backend import FRAME_NBYTES, PART, PATIENCE_S, Behaviour, Hang, ScriptedBackend, key_of, wait

from lmcache_core.errors import PoolFull
from lmcache_core.events import Event, EventBus
from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage import (
    Breaker,
    Capabilities,
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


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RecordingJob(Job):
    """Keeps what it is told, and its own rules: nothing twice, nothing after `finished`."""

    def __init__(
        self,
        operation: Operation,
        numbers: Sequence[int],
        *,
        deadline: float,
        priority: Priority = Priority.LOAD,
        nbytes: int | None = None,
        view_nbytes: int = FRAME_NBYTES,
        room_for: int | None = None,
        whole: bool = True,
        offset: int = 0,
    ) -> None:
        self.operation = operation
        self.priority = priority
        self.deadline = deadline
        self.num_items = len(numbers)
        self.nbytes = view_nbytes * len(numbers) if nbytes is None else nbytes
        self.outcomes: dict[int, Outcome] = {}
        self.headers: dict[int, FrameHeader | None] = {}
        self.landings: dict[int, Outcome] = {}
        self.buffers: list[bytearray] = []
        self.is_prepared = threading.Event()
        self.is_moving = threading.Event()  # prepared, or something is settled
        self.is_settled = threading.Event()
        self.is_finished = threading.Event()
        self.faults: list[str] = []
        self.on_prepare: Callable[[], None] = lambda: None
        self.on_settled: Callable[[int, Outcome], None] = lambda index, outcome: None
        self.numbers = numbers
        self._view_nbytes = view_nbytes
        self._room_for = len(numbers) if room_for is None else room_for
        self._whole = whole
        self._offset = offset
        self._lock = threading.Lock()

    def prepare(self) -> Sequence[Item] | Sequence[StorageKey]:
        self.is_prepared.set()
        self.is_moving.set()
        self.on_prepare()
        if self._room_for == 0:
            raise PoolFull("no room")
        keys = [key_of(number) for number in self.numbers[: self._room_for]]
        if self.operation not in (Operation.GET, Operation.PUT):
            return keys
        self.buffers = [bytearray(self._view_nbytes) for _ in keys]
        return [
            Item(
                key,
                (View(0, self._view_nbytes, memoryview(buffer)),),
                whole=self._whole,
                offset=self._offset,
            )
            for key, buffer in zip(keys, self.buffers, strict=True)
        ]

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        with self._lock:
            if index in self.outcomes:
                self.faults.append(f"item {index} was settled twice")
            if self.is_finished.is_set():
                self.faults.append(f"item {index} was settled after the end")
            self.outcomes[index] = outcome
            self.headers[index] = header
            self.is_moving.set()
            if len(self.outcomes) == self.num_items:
                self.is_settled.set()
        self.on_settled(index, outcome)

    def landed(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            if index not in self.outcomes or index in self.landings:
                self.faults.append(f"item {index} landed unsettled, or twice")
            if self.is_finished.is_set():
                self.faults.append(f"item {index} landed after the end")
            self.landings[index] = outcome

    def finished(self) -> None:
        with self._lock:
            if self.is_finished.is_set():
                self.faults.append("finished twice")
            if len(self.outcomes) < self.num_items:
                self.faults.append(f"finished with {len(self.outcomes)} of {self.num_items} settled")
            self.is_finished.set()

    def statuses(self) -> list[Status]:
        """Of all items, once they are settled."""
        wait(self.is_settled)
        return [self.outcomes[index].status for index in range(self.num_items)]

    def error(self, index: int = 0) -> BaseException | None:
        wait(self.is_settled)
        return self.outcomes[index].error


class Scenario:
    """An executor over a scripted backend and a fake clock; leaving it proves that nothing leaked."""

    def __init__(
        self,
        *,
        max_in_flight: int = 1,
        in_flight_bytes: int = 1 << 20,
        queue_limit: int = 16,
        failures: int = 3,
        retries: float = 0.0,
        is_open: bool = True,
        offers: Capabilities | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.backend = ScriptedBackend()
        if offers is not None:
            self.backend.offers = offers
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self)
        self.lost: list[tuple[Any, str]] = []
        self.verifier = Verifier()
        self.jobs: list[RecordingJob] = []
        self.hangs: list[Hang] = []
        self.read_breaker = Breaker(failures=failures, cool_down_s=5, clock=self.clock)
        self.write_breaker = Breaker(failures=failures, cool_down_s=5, clock=self.clock)
        self.executor = TierExecutor(
            self.backend,
            TierHost(
                tier="slow",
                deadline_s=10,
                max_in_flight=max_in_flight,
                capacity_bytes=None,
                parts=(PART,),
                pool=None,  # type: ignore[arg-type]  # a scripted backend asks for none
                on_lost=lambda copies, reason: self.lost.append((copies, reason)),
                on_lost_all=lambda reason: self.lost.append(("all", reason)),
            ),
            max_in_flight=max_in_flight,
            in_flight_bytes=in_flight_bytes,
            queue_limit=queue_limit,
            read_breaker=self.read_breaker,
            write_breaker=self.write_breaker,
            retry=RetryBudget(ratio=0.0, most=retries),
            verifier=self.verifier,
            events=bus,
            clock=self.clock,
        )
        if is_open:
            self.executor.open(self.clock() + PATIENCE_S)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def hang(self, then: Behaviour | None = None) -> Hang:
        """A hang that the end of the scenario lets go, should the test not have done so."""
        hang = Hang(then)
        self.hangs.append(hang)
        return hang

    def submit(self, operation: Operation, *numbers: int, **options: Any) -> RecordingJob:
        job = self.job(operation, *numbers, **options)
        self.executor.submit(job)
        return job

    def job(self, operation: Operation, *numbers: int, **options: Any) -> RecordingJob:
        options.setdefault("deadline", self.clock() + 10)
        job = RecordingJob(operation, numbers, **options)
        self.jobs.append(job)
        return job

    def submit_into(self, hang: Hang, operation: Operation, *numbers: int, **options: Any) -> RecordingJob:
        """Submits a job and returns once the backend hangs in it."""
        job = self.submit(operation, *numbers, **options)
        wait(hang.entered)
        return job

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.executor.expire()

    def quiet(self) -> None:
        """Waits until the backend has let go of everything, and every job is finished."""
        traffic = self.executor._traffic
        ended = traffic._quiet.wait_for(lambda: not traffic._live, time.monotonic() + PATIENCE_S)
        assert ended, "jobs don't finish"

    @property
    def counters(self) -> dict[str, int]:
        return self.executor.stats().counters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hang in self.hangs:
            hang.let_go()
        self.executor.close(self.clock() + PATIENCE_S)
        self.verifier.close()
        if error is not None:
            return
        self.quiet()
        traffic = self.executor.stats().traffic
        assert (traffic.queued, traffic.running, traffic.stuck, traffic.in_flight_bytes) == (0, 0, 0, 0)
        for job in self.jobs:
            assert job.faults == []
            assert job.is_finished.is_set()
