"""What waits, in which order, and what it takes to get in."""

from __future__ import annotations

import pytest
from executor_scenario import Scenario
from scripted_backend import FRAME_NBYTES, key_of, read_frames, wait

from lmcache_core.errors import BackendError, NotSupported
from lmcache_core.storage import Capabilities, Operation, Priority, Status


def test_loads_go_before_prefetches_before_stores_and_each_in_order() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.stat = scenario.hang()
        scenario.submit_into(hang, Operation.STAT, 0)
        for number, (operation, priority) in enumerate(
            [
                (Operation.PUT, Priority.STORE),
                (Operation.GET, Priority.PREFETCH),
                (Operation.GET, Priority.LOAD),
                (Operation.PUT, Priority.STORE),
                (Operation.GET, Priority.LOAD),
            ],
            start=1,
        ):
            scenario.submit(operation, number, priority=priority)
        hang.let_go()
        scenario.quiet()
        order = [keys[0] for _, keys in scenario.backend.asked[1:]]
        assert order == [key_of(number) for number in (3, 5, 2, 1, 4)]


def test_memory_is_taken_only_at_dispatch() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        scenario.submit_into(hang, Operation.GET, 1)
        waiting = scenario.submit(Operation.GET, 2)
        assert not waiting.is_prepared.is_set()
        hang.let_go()
        assert waiting.statuses() == [Status.OK]
        assert waiting.is_prepared.is_set()


def test_a_shorter_prefix_is_asked_for_and_the_rest_settles_full() -> None:
    with Scenario() as scenario:
        job = scenario.submit(Operation.GET, 1, 2, 3, room_for=2)
        assert job.statuses() == [Status.OK, Status.OK, Status.FULL]
        assert scenario.backend.asked == [("get", [key_of(1), key_of(2)])]


@pytest.mark.parametrize("numbers", [(1, 2), ()], ids=["no room", "nothing wanted"])
def test_a_job_without_anything_to_ask_for_ends_without_a_call(numbers: tuple[int, ...]) -> None:
    with Scenario() as scenario:
        job = scenario.submit(Operation.GET, *numbers, room_for=0)
        wait(job.is_finished)
        assert [outcome.status for outcome in job.outcomes.values()] == [Status.FULL] * len(numbers)
        assert scenario.backend.asked == []


def test_a_job_that_fails_to_prepare_fails_and_the_thread_goes_on() -> None:
    with Scenario() as scenario:
        job = scenario.job(Operation.GET, 1)
        job.on_prepare = lambda: 1 / 0  # type: ignore[assignment,return-value]
        scenario.executor.submit(job)
        assert job.statuses() == [Status.FAILED]
        assert "ZeroDivisionError" in str(job.error())
        assert scenario.submit(Operation.GET, 2).statuses() == [Status.OK]


def test_nothing_is_settled_while_a_job_prepares() -> None:
    with Scenario() as scenario:
        job = scenario.job(Operation.GET, 1)
        seen: list[int] = []

        def prepare() -> None:
            scenario.pass_time(10)
            seen.append(len(job.outcomes))

        job.on_prepare = prepare
        scenario.executor.submit(job)
        assert job.statuses() == [Status.TIMEOUT]
        assert seen == [0]
        wait(job.is_finished)
        assert scenario.backend.asked == []


def test_a_queued_job_can_be_cancelled_and_a_running_one_cannot() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        running = scenario.submit_into(hang, Operation.GET, 1)
        queued = scenario.submit(Operation.GET, 2)
        assert scenario.executor.cancel(queued)
        assert queued.statuses() == [Status.FAILED]
        assert queued.is_finished.is_set()
        assert "cancelled" in str(queued.error())
        assert not scenario.executor.cancel(queued)
        assert not scenario.executor.cancel(running)
        hang.let_go()
        assert running.statuses() == [Status.OK]
        scenario.quiet()
        assert len(scenario.backend.asked) == 1


def test_a_full_queue_refuses_at_once() -> None:
    with Scenario(queue_limit=1) as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        scenario.submit_into(hang, Operation.GET, 1)
        scenario.submit(Operation.GET, 2)
        refused = scenario.submit(Operation.GET, 3)
        assert refused.is_finished.is_set()
        assert isinstance(refused.error(), BackendError)
        assert "1 jobs wait" in str(refused.error())


def test_queued_and_running_bytes_count_against_the_bound() -> None:
    with Scenario(in_flight_bytes=2 * FRAME_NBYTES) as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        scenario.submit_into(hang, Operation.GET, 1)
        scenario.submit(Operation.GET, 2)
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.FAILED]
        hang.let_go()
        scenario.quiet()
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]


def test_at_most_max_in_flight_calls_are_inside_the_backend() -> None:
    with Scenario(max_in_flight=2) as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        for number in range(6):
            scenario.submit(Operation.GET, number)
        hang.wait_for_calls(2)
        traffic = scenario.executor.stats().traffic
        assert (traffic.running, traffic.queued, traffic.threads) == (2, 4, 2)
        hang.let_go()
        scenario.quiet()
        assert len(hang.calls) == 6


def test_the_backends_own_limit_of_calls_binds() -> None:
    with Scenario(max_in_flight=8, offers=Capabilities(max_in_flight=1)) as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        scenario.submit_into(hang, Operation.GET, 1)
        scenario.submit(Operation.GET, 2)
        traffic = scenario.executor.stats().traffic
        assert (traffic.running, traffic.threads) == (1, 1)


def test_an_undeclared_operation_is_refused_without_asking() -> None:
    with Scenario(offers=Capabilities()) as scenario:
        job = scenario.submit(Operation.DELETE, 1)
        assert isinstance(job.error(), NotSupported)
        with pytest.raises(NotSupported):
            scenario.executor.scan("", scenario.clock() + 10)
        assert scenario.backend.asked == []


def test_the_same_job_cannot_be_in_flight_twice() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        job = scenario.submit_into(hang, Operation.GET, 1)
        with pytest.raises(ValueError, match="submitted before"):
            scenario.executor.submit(job)
        hang.let_go()
        assert job.statuses() == [Status.OK]


def test_without_a_thread_to_run_it_a_job_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scenario() as scenario:
        with monkeypatch.context() as patch:

            def refuse(thread: object) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr("threading.Thread.start", refuse)
            job = scenario.submit(Operation.STAT, 1)
            assert "no thread can be started" in str(job.error())
        assert scenario.submit(Operation.STAT, 1).statuses() == [Status.MISS]


def test_callbacks_that_raise_kill_no_thread() -> None:
    with Scenario() as scenario:
        job = scenario.job(Operation.GET, 1, 2)
        job.on_settled = lambda index, outcome: 1 / 0  # type: ignore[assignment,return-value]
        scenario.executor.submit(job)
        wait(job.is_finished)
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]
        scenario.quiet()
        assert scenario.counters["callback_errors"] == 2


def test_a_callback_may_submit_the_next_job() -> None:
    with Scenario() as scenario:
        first = scenario.job(Operation.STAT, 1)
        second = scenario.job(Operation.STAT, 2)
        first.on_settled = lambda index, outcome: scenario.executor.submit(second)
        scenario.executor.submit(first)
        assert second.statuses() == [Status.MISS]
