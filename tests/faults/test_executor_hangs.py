"""A hung backend costs its callers the deadline, keeps only what it holds, and is forgiven afterwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from executor_scenario import Scenario
from scripted_backend import FRAME_NBYTES, OK, read_frames, settle_all, wait

from lmcache_core.errors import BackendUnavailable, DeadlineExceeded
from lmcache_core.storage import BreakerState, Call, Item, Operation, Outcome, Status


def test_a_hung_call_ends_at_its_deadline_and_not_before() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang()
        job = scenario.submit_into(hang, Operation.GET, 1, 2)
        scenario.pass_time(9.99)
        assert not job.outcomes
        scenario.pass_time(0.01)
        assert job.statuses() == [Status.TIMEOUT] * 2
        error = job.error()
        assert isinstance(error, DeadlineExceeded)
        assert (error.backend, error.op) == ("slow", "get")


def test_the_alarm_settles_what_is_due_without_any_help() -> None:
    with Scenario(max_in_flight=2) as scenario:
        hang = scenario.backend.get = scenario.hang()
        running = scenario.submit_into(hang, Operation.GET, 1)
        scenario.clock.now += 10
        queued = scenario.submit(Operation.STAT, 2, deadline=scenario.clock() - 1)  # the alarm looks now
        assert running.statuses() == queued.statuses() == [Status.TIMEOUT]


def test_memory_stays_quarantined_until_the_backend_lets_go() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang()
        job = scenario.submit_into(hang, Operation.GET, 1)
        scenario.pass_time(10)
        traffic = scenario.executor.stats().traffic
        assert (traffic.running, traffic.stuck, traffic.in_flight_bytes) == (1, 1, FRAME_NBYTES)
        assert not job.is_finished.is_set()
        hang.let_go()
        wait(job.is_finished)
        scenario.quiet()
        traffic = scenario.executor.stats().traffic
        assert (traffic.running, traffic.stuck, traffic.in_flight_bytes) == (0, 0, 0)


def test_a_late_read_is_settled_as_timeout_only_and_reported_to_nobody() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        job = scenario.submit_into(hang, Operation.GET, 1)
        scenario.pass_time(10)
        hang.let_go()
        wait(job.is_finished)
        assert job.statuses() == [Status.TIMEOUT]
        assert job.headers == {0: None}
        assert job.landings == {}
        scenario.quiet()
        assert scenario.counters["late_results"] == 1


def test_a_late_put_is_reported_when_it_lands() -> None:
    with Scenario() as scenario:
        put = Outcome(status=Status.OK, stored=5000, token=7)
        hang = scenario.backend.put = scenario.hang(settle_all(put))
        job = scenario.submit_into(hang, Operation.PUT, 1, 2)
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT] * 2
        hang.let_go()
        wait(job.is_finished)
        landed = Outcome(status=Status.OK, nbytes=FRAME_NBYTES, stored=5000, token=7)
        assert job.landings == {0: landed, 1: landed}


def test_a_put_that_fails_late_lands_as_failed() -> None:
    with Scenario() as scenario:

        def fail(items: object, call: object) -> None:
            raise OSError("broken")

        hang = scenario.backend.put = scenario.hang(fail)
        job = scenario.submit_into(hang, Operation.PUT, 1)
        scenario.pass_time(10)
        hang.let_go()
        wait(job.is_finished)
        assert job.landings[0].status is Status.FAILED


def test_a_put_lands_only_after_its_timeout_was_reported() -> None:
    with Scenario() as scenario:
        done = threading.Event()

        def put(items: Sequence[Item], call: Call) -> None:
            settle_all()(items, call)
            done.set()

        hang = scenario.backend.put = scenario.hang(put)
        job = scenario.submit_into(hang, Operation.PUT, 1, 2)

        def settled(index: int, outcome: Outcome) -> None:
            if index == 0:  # both land while the first of them is being reported
                hang.let_go()
                wait(done)
                assert job.landings == {}

        job.on_settled = settled
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT] * 2
        wait(job.is_finished)
        assert sorted(job.landings) == [0, 1]
        assert "callback_errors" not in scenario.counters


def test_items_settled_before_the_hang_keep_their_outcome() -> None:
    with Scenario() as scenario:
        hang = scenario.hang(lambda items, call: call.done(1, OK))

        def put(items: object, call: object) -> None:
            call.done(0, OK)  # type: ignore[attr-defined]
            hang(items, call)  # type: ignore[arg-type]

        scenario.backend.put = put
        job = scenario.submit_into(hang, Operation.PUT, 1, 2)
        assert list(job.outcomes) == [0]
        scenario.pass_time(10)
        assert job.statuses() == [Status.OK, Status.TIMEOUT]
        hang.let_go()
        wait(job.is_finished)
        assert list(job.landings) == [1]


def test_a_job_in_the_queue_times_out_without_having_started() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1, deadline=scenario.clock() + 100)
        job = scenario.submit(Operation.GET, 2)
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT]
        assert job.is_finished.is_set()
        assert not job.is_prepared.is_set()
        assert scenario.executor.stats().traffic.in_flight_bytes == FRAME_NBYTES
        hang.let_go()
        scenario.quiet()
        assert len(scenario.backend.asked) == 1


def test_once_no_call_returns_further_jobs_are_refused_as_busy() -> None:
    with Scenario(max_in_flight=2) as scenario:
        hangs = []
        for number in (1, 2):
            hang = scenario.backend.get = scenario.hang()
            scenario.submit_into(hang, Operation.GET, number)
            hangs.append(hang)
        scenario.pass_time(10)
        job = scenario.submit(Operation.GET, 3)
        assert job.is_finished.is_set()
        error = job.error()
        assert isinstance(error, BackendUnavailable)
        assert "busy" in str(error)
        assert not job.is_prepared.is_set()
        scenario.backend.get = read_frames
        hangs[0].let_go()
        wait(scenario.jobs[0].is_finished)
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]


def test_a_call_that_settles_all_and_does_not_return_is_a_hang_too() -> None:
    with Scenario(max_in_flight=3, failures=2) as scenario:
        hang = scenario.hang(lambda targets, call: None)

        def get(items: Sequence[Item], call: Call) -> None:
            read_frames(items, call)
            hang(items, call)

        def stat(keys: Sequence[object], call: Call) -> None:
            settle_all(OK)(keys, call)
            hang(keys, call)

        scenario.backend.get, scenario.backend.stat = get, stat
        scenario.submit_into(hang, Operation.GET, 1)
        answered = scenario.submit(Operation.STAT, 2)
        hang.wait_for_calls(2)
        assert answered.statuses() == [Status.OK]
        assert scenario.executor.stats().traffic.stuck == 0
        scenario.pass_time(10)
        assert scenario.executor.stats().traffic.stuck == 2
        assert scenario.read_breaker.state is BreakerState.OPEN
        hang.let_go()
        scenario.quiet()
        assert scenario.executor.stats().traffic.stuck == 0
        assert scenario.read_breaker.state is BreakerState.OPEN  # that they came back late heals nothing


def test_once_every_call_lingers_further_jobs_are_refused_as_busy() -> None:
    with Scenario() as scenario:
        hang = scenario.hang(lambda targets, call: None)

        def stat(keys: Sequence[object], call: Call) -> None:
            settle_all(OK)(keys, call)
            hang(keys, call)

        scenario.backend.stat = stat
        scenario.submit_into(hang, Operation.STAT, 1)
        scenario.pass_time(10)
        refused = scenario.submit(Operation.STAT, 2)
        assert "no call returns" in str(refused.error())


def test_quarantined_bytes_count_against_the_bound() -> None:
    with Scenario(max_in_flight=2, in_flight_bytes=2 * FRAME_NBYTES) as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1, 2)
        scenario.pass_time(10)
        scenario.backend.get = read_frames
        refused = scenario.submit(Operation.GET, 3)
        assert refused.statuses() == [Status.FAILED]
        assert "bytes are in flight" in str(refused.error())
        hang.let_go()
        scenario.quiet()
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]


def test_the_breaker_opens_on_hangs_and_heals_when_they_end() -> None:
    with Scenario(max_in_flight=3, failures=3) as scenario:
        hang = scenario.backend.get = scenario.hang()
        for number in range(3):
            scenario.submit(Operation.GET, number)
        hang.wait_for_calls(3)
        scenario.pass_time(10)
        assert scenario.read_breaker.state is BreakerState.OPEN
        assert scenario.write_breaker.state is BreakerState.CLOSED
        hang.let_go()
        scenario.quiet()
        assert "breaker open" in str(scenario.submit(Operation.GET, 1).error())
        scenario.pass_time(5)
        scenario.backend.get = read_frames
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]
        scenario.quiet()
        assert scenario.read_breaker.state is BreakerState.CLOSED


def test_jobs_that_wait_behind_a_hang_count_as_failures_of_the_store() -> None:
    with Scenario(max_in_flight=1, failures=3) as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1)
        for number in (2, 3):
            scenario.submit(Operation.GET, number)
        scenario.pass_time(10)
        assert scenario.read_breaker.state is BreakerState.OPEN


def test_jobs_that_wait_behind_slow_calls_do_not_count_as_failures() -> None:
    with Scenario(max_in_flight=1, failures=1) as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        slow = scenario.submit_into(hang, Operation.GET, 1, deadline=scenario.clock() + 100)
        waiting = scenario.submit(Operation.GET, 2)
        scenario.pass_time(10)
        assert waiting.statuses() == [Status.TIMEOUT]
        assert scenario.read_breaker.state is BreakerState.CLOSED
        hang.let_go()
        assert slow.statuses() == [Status.OK]


def test_a_half_open_call_that_never_returns_does_not_wedge_the_breaker() -> None:
    with Scenario(max_in_flight=2, failures=1) as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1)
        scenario.pass_time(10)
        assert scenario.read_breaker.state is BreakerState.OPEN
        scenario.pass_time(5)
        trying = scenario.backend.get = scenario.hang()
        scenario.submit_into(trying, Operation.GET, 2)
        assert scenario.read_breaker.state is BreakerState.HALF_OPEN
        scenario.pass_time(10)
        assert scenario.read_breaker.state is BreakerState.OPEN
        hang.let_go()
        wait(scenario.jobs[0].is_finished)
        scenario.pass_time(5)
        scenario.backend.get = read_frames
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]


def test_the_call_tells_the_backend_what_remains_and_when_to_stop() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1)
        (call,) = hang.calls
        assert call.deadline == scenario.clock() + 10
        scenario.clock.now += 4
        assert call.remaining() == 6
        assert not call.cancelled
        scenario.pass_time(6)
        assert call.cancelled
        with pytest.raises(DeadlineExceeded):
            call.remaining()


@pytest.mark.parametrize("settles", [True, False], ids=["settled", "raised"])
def test_a_backend_that_gives_up_at_the_deadline_by_itself_is_a_timeout_too(settles: bool) -> None:
    with Scenario() as scenario:

        def give_up(items: Sequence[Item], call: Call) -> None:
            scenario.clock.now += 10
            try:
                call.remaining()
            except DeadlineExceeded as error:
                if not settles:
                    raise
                call.done(0, Outcome(status=Status.FAILED, error=error))

        scenario.backend.get = give_up
        job = scenario.submit(Operation.GET, 1)
        assert job.statuses() == [Status.TIMEOUT]
        wait(job.is_finished)


def test_no_thread_keeps_the_process_from_ending() -> None:
    before = set(threading.enumerate())
    with Scenario(max_in_flight=2) as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1)
        threads = set(threading.enumerate()) - before
        assert threads
        assert all(thread.daemon for thread in threads)
