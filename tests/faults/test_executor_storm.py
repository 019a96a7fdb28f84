"""Everything at once: whatever a backend and the clock do, each item is settled once and nothing leaks."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from executor_scenario import RecordingJob, Scenario
from scripted_backend import FRAME_NBYTES, Hang, fill, frame_of, wait

from lmcache_core.errors import BackendUnavailable
from lmcache_core.storage import Call, Capabilities, Item, Operation, Outcome, Priority, Status

NUM_STEPS = 400


class Chaos:
    """Behaves well, badly or not at all, by chance; `let_go` ends a hang, or settles what was kept back."""

    def __init__(self, seed: int, *, asynchronous: bool) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards the three below
        self._held: list[tuple[Hang, Sequence[Any], Call]] = []
        self._calm = False
        self._asynchronous = asynchronous

    def __call__(self, targets: Sequence[Any], call: Call) -> None:
        for index, target in enumerate(targets):
            with self._lock:
                dice = self._random.random()
            if dice < 0.6:
                self.settle(index, target, call)
            elif dice < 0.65:
                call.done(index, Outcome(status=Status.FAILED, error=BackendUnavailable("hiccup")))
            elif dice < 0.7:
                call.done(index, Outcome(status=Status.TIMEOUT))
            elif dice < 0.75:
                self.settle(index, target, call)
                self.settle(index, target, call)
            elif dice < 0.8:
                raise OSError(5, "I/O error")
            elif dice < 0.85:
                threading.Thread(target=self.settle, args=(index, target, call), daemon=True).start()
            elif dice < 0.9:
                call.done(index + 1000, Outcome(status=Status.OK))
                self.hold(targets, call, blocks=False)
            else:
                self.hold(targets, call, blocks=not self._asynchronous)

    def hold(self, targets: Sequence[Any], call: Call, *, blocks: bool) -> None:
        hang = Hang(lambda targets, call: None)
        with self._lock:
            calm = self._calm
            if not calm:
                self._held.append((hang, targets, call))
        if calm:
            self.release(hang, targets, call)
        elif blocks:
            hang(targets, call)

    def release(self, hang: Hang, targets: Sequence[Any], call: Call) -> None:
        hang.let_go()
        if self._asynchronous:
            for index in range(len(targets)):
                call.done(index, Outcome(status=Status.OK))

    def settle(self, index: int, target: Any, call: Call) -> None:
        nbytes = 0
        if isinstance(target, Item):
            nbytes = target.nbytes
            fill(target, frame_of(int(target.key[-8:], 16)))
        call.done(index, Outcome(status=Status.OK, nbytes=nbytes))

    def let_go(self) -> bool:
        with self._lock:
            if not self._held:
                return False
            held = self._held.pop(self._random.randrange(len(self._held)))
        self.release(*held)
        return True

    def calm_down(self) -> None:
        """Nothing blocks from now on, and what was kept back is let go."""
        with self._lock:
            self._calm = True
        while self.let_go():
            pass


@pytest.fixture(autouse=True)
def _threads_that_take_turns_often() -> Iterator[None]:
    """Races that need a switch at the wrong moment are a hundred times as likely with this."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("seed", range(10))
def test_in_a_storm_every_item_is_settled_once_and_nothing_leaks(seed: int, asynchronous: bool) -> None:
    offers = Capabilities(delete=True, asynchronous=asynchronous, max_in_flight=3)
    chance = random.Random(seed)
    with Scenario(
        max_in_flight=3,
        in_flight_bytes=24 * FRAME_NBYTES,
        queue_limit=8,
        failures=6,
        retries=50,
        offers=offers,
    ) as scenario:
        chaos = Chaos(seed, asynchronous=asynchronous)
        backend = scenario.backend
        backend.get = backend.put = backend.stat = backend.delete = chaos
        for _ in range(NUM_STEPS):
            dice = chance.random()
            if dice < 0.5:
                before = scenario.executor.stats().traffic
                job = submit_any(scenario, chance)
                if before.running < 3 and not before.queued:
                    wait(job.is_moving)  # a slot is free for it
            elif dice < 0.55 and scenario.jobs:
                scenario.executor.cancel(chance.choice(scenario.jobs))
            elif dice < 0.65:
                scenario.pass_time(chance.choice((0.1, 1.0, 6.0)))
            else:
                chaos.let_go()
            traffic = scenario.executor.stats().traffic
            assert traffic.in_flight_bytes <= 24 * FRAME_NBYTES
            assert traffic.stuck <= traffic.running <= 3
            assert traffic.threads <= 3
        if seed % 2:
            scenario.executor.close(scenario.clock())
        else:
            scenario.pass_time(20)
        for job in scenario.jobs:  # settled although hangs are still there
            assert job.is_settled.wait(30)
        chaos.calm_down()
        scenario.quiet()
        for job in scenario.jobs:
            for index, outcome in job.outcomes.items():
                if job.operation is Operation.GET and outcome.status is Status.OK:
                    assert job.buffers[index] == frame_of(job.numbers[index])


def submit_any(scenario: Scenario, chance: random.Random) -> RecordingJob:
    operation = chance.choice((Operation.GET, Operation.PUT, Operation.STAT, Operation.DELETE))
    numbers = [chance.randrange(1000) for _ in range(chance.randrange(1, 5))]
    return scenario.submit(
        operation,
        *numbers,
        deadline=scenario.clock() + chance.choice((0.5, 2, 8)),
        priority=chance.choice(list(Priority)),
        room_for=chance.choice((len(numbers), len(numbers), 1)),
    )
