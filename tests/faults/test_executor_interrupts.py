"""What isn't an Exception: CancelledError and SystemExit out of callbacks, and Ctrl-C on the main thread."""

from __future__ import annotations

import asyncio
import threading

import pytest
from executor_scenario import Scenario
from scripted_backend import MISS, key_of, settle_all, wait

from lmcache_core.errors import BackendError
from lmcache_core.events import BreakerChanged, Event
from lmcache_core.frame import FrameHeader
from lmcache_core.storage import BreakerState, Item, Operation, Outcome, Status
from lmcache_core.storage import transfer as transfer_module

RAISED = [asyncio.CancelledError, SystemExit, GeneratorExit, KeyboardInterrupt]


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("operation", [Operation.GET, Operation.PUT])  # on the verifier's thread, on a worker
def test_a_callback_cannot_end_our_threads(operation: Operation, raised: type[BaseException]) -> None:
    def fail(index: int, outcome: Outcome) -> None:
        raise raised

    with Scenario() as scenario:
        job = scenario.job(operation, 1, 2)
        job.on_settled = fail
        scenario.executor.submit(job)
        wait(job.is_finished)
        assert job.statuses() == [Status.OK, Status.OK]
        assert scenario.submit(operation, 3).statuses() == [Status.OK]
        scenario.quiet()
        assert scenario.counters["callback_errors"] == 2


@pytest.mark.parametrize("raised", RAISED)
def test_a_job_that_cannot_prepare_fails_whatever_it_raised(raised: type[BaseException]) -> None:
    def fail() -> None:
        raise raised

    with Scenario() as scenario:
        job = scenario.job(Operation.PUT, 1, 2)
        job.on_prepare = fail
        scenario.executor.submit(job)
        assert job.statuses() == [Status.FAILED, Status.FAILED]
        assert scenario.submit(Operation.PUT, 3).statuses() == [Status.OK]


@pytest.mark.parametrize("raised", RAISED)
def test_a_check_that_raises_settles_its_item(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(item: Item, nbytes: int) -> FrameHeader:
        raise raised

    with Scenario() as scenario:
        with monkeypatch.context() as patch:
            patch.setattr(transfer_module, "check_frame", fail)
            job = scenario.submit(Operation.GET, 1)
            assert job.statuses() == [Status.FAILED]
            assert isinstance(job.error(), BackendError)
            wait(job.is_finished)
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]


@pytest.mark.parametrize("raised", RAISED)
def test_an_observer_of_the_breaker_takes_no_slot_with_it(raised: type[BaseException]) -> None:
    class Observer:
        def on_event(self, event: Event) -> None:
            raise raised

    with Scenario(failures=1) as scenario:
        scenario.executor._health.events.subscribe(Observer(), BreakerChanged)
        scenario.backend.put = settle_all(Outcome(status=Status.FAILED, error=BackendError("broken")))
        scenario.submit(Operation.PUT, 1)
        scenario.quiet()
        assert scenario.write_breaker.state is BreakerState.OPEN
        assert scenario.executor.stats().traffic.running == 0
        assert scenario.submit(Operation.STAT, 1).statuses() == [Status.MISS]


@pytest.mark.parametrize("raised", RAISED[:3])
def test_an_outcome_that_cannot_be_looked_at_is_a_failure(raised: type[BaseException]) -> None:
    class Rude(BackendError):
        def __str__(self) -> str:
            raise raised

        def __init__(self) -> None:
            """Sets none of the fields that it should have."""

    with Scenario() as scenario:
        scenario.backend.stat = settle_all(Outcome(status=Status.FAILED, error=Rude()))
        assert scenario.submit(Operation.STAT, 1).statuses() == [Status.FAILED]
        scenario.quiet()
        scenario.backend.stat = settle_all(MISS)
        assert scenario.submit(Operation.STAT, 1).statuses() == [Status.MISS]


@pytest.mark.parametrize("raised", RAISED[:3])
def test_no_driver_sees_what_the_tier_raises_about_lost_copies(raised: type[BaseException]) -> None:
    with Scenario(is_open=False) as scenario:
        hosts = []
        scenario.backend.on_open = hosts.append
        scenario.executor.open(scenario.clock() + 30)

        class Lost:
            def append(self, lost: object) -> None:
                raise raised

        scenario.lost = Lost()  # type: ignore[assignment]
        hosts[0].lost([(key_of(1), 7)], "expired")
        hosts[0].lost_all("flushed")


def interrupt(index: int, outcome: Outcome) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_in_a_refused_job_is_raised_once_every_item_is_settled() -> None:
    with Scenario(queue_limit=0) as scenario:
        job = scenario.job(Operation.STAT, 1, 2, 3)
        job.on_settled = interrupt
        with pytest.raises(KeyboardInterrupt):
            scenario.executor.submit(job)
        assert len(job.outcomes) == 3
        assert job.is_finished.is_set()


def test_ctrl_c_while_closing_is_raised_once_the_executor_is_closed() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.stat = scenario.hang()
        scenario.submit_into(hang, Operation.STAT, 0)
        jobs = [scenario.job(Operation.STAT, number, number + 1) for number in (1, 3)]
        for job in jobs:
            job.on_settled = interrupt
            scenario.executor.submit(job)
        scenario.backend.on_close = hang.let_go
        with pytest.raises(KeyboardInterrupt):
            scenario.executor.close(scenario.clock() + 30)
        assert all(len(job.outcomes) == 2 and job.is_finished.is_set() for job in jobs)


@pytest.mark.parametrize("started", [False, True])
def test_ctrl_c_while_a_thread_starts_leaves_the_tier_able_to_run_jobs(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    with Scenario(max_in_flight=1) as scenario:
        first = scenario.job(Operation.STAT, 1)
        with monkeypatch.context() as patch:
            patch.setattr("threading.Thread.start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scenario.executor.submit(first)
        assert scenario.submit(Operation.STAT, 2).statuses() == [Status.MISS]
        assert first.statuses() == [Status.MISS]
        assert scenario.executor.stats().traffic.threads <= 1


def test_ctrl_c_right_behind_the_admission_of_a_job_leaves_it_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scenario() as scenario:
        job = scenario.job(Operation.STAT, 1)
        admit = scenario.executor._traffic.admit

        def interrupted(transfer: transfer_module.Transfer) -> str:
            admit(transfer)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(scenario.executor._traffic, "admit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scenario.executor.submit(job)
        assert job.statuses() == [Status.MISS]
