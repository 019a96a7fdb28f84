"""Breakers and retries: a failing store is left alone for a while, a hiccup is not passed on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from executor_scenario import Scenario
from scripted_backend import MISS, OK, Behaviour, in_turn, key_of, raising, read_frames, settle_all, wait

from lmcache_core.errors import BackendError, BackendUnavailable
from lmcache_core.events import BreakerChanged
from lmcache_core.storage import BreakerState, Call, Item, Operation, Outcome, Status

BROKEN = Outcome(status=Status.FAILED, error=BackendError("broken"))


def hiccup() -> Outcome:
    return Outcome(status=Status.FAILED, error=BackendUnavailable("reset"))


def test_failures_in_a_row_open_the_breaker_of_their_kind_only() -> None:
    with Scenario(failures=3) as scenario:
        scenario.backend.put = settle_all(BROKEN)
        for number in range(3):
            assert scenario.write_breaker.state is BreakerState.CLOSED
            scenario.submit(Operation.PUT, number)
            scenario.quiet()
        assert scenario.write_breaker.state is BreakerState.OPEN
        refused = scenario.submit(Operation.PUT, 4)
        assert refused.is_finished.is_set()
        assert isinstance(refused.error(), BackendUnavailable)
        assert "breaker open" in str(refused.error())
        assert len(scenario.backend.asked) == 3
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]


@pytest.mark.parametrize(
    ("operation", "outcome"),
    [
        (Operation.GET, MISS),
        (Operation.GET, Outcome(status=Status.TOO_SMALL, nbytes=1 << 30)),
        (Operation.PUT, Outcome(status=Status.FULL)),
        (Operation.STAT, MISS),
    ],
    ids=str,
)
def test_an_answer_is_a_success_whatever_it_says(operation: Operation, outcome: Outcome) -> None:
    with Scenario(failures=1) as scenario:
        scenario.backend.get = scenario.backend.put = scenario.backend.stat = settle_all(outcome)
        scenario.submit(operation, 1)
        scenario.quiet()
        assert scenario.read_breaker.state is scenario.write_breaker.state is BreakerState.CLOSED


def test_a_call_that_brought_something_is_a_success() -> None:
    with Scenario(failures=1) as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(0, OK)
            call.done(1, BROKEN)

        scenario.backend.put = put
        assert scenario.submit(Operation.PUT, 1, 2).statuses() == [Status.OK, Status.FAILED]
        scenario.quiet()
        assert scenario.write_breaker.state is BreakerState.CLOSED


def test_a_call_that_brought_something_but_not_all_in_time_is_a_failure() -> None:
    with Scenario(failures=2) as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(0, OK)
            scenario.clock.now += 10
            call.remaining()

        scenario.backend.put = put
        for _ in range(2):
            assert scenario.write_breaker.state is BreakerState.CLOSED
            assert scenario.submit(Operation.PUT, 1, 2).statuses() == [Status.OK, Status.TIMEOUT]
            scenario.quiet()
        assert scenario.write_breaker.state is BreakerState.OPEN


def test_how_a_call_ends_after_its_deadline_changes_nothing_any_more() -> None:
    with Scenario(failures=3) as scenario:
        endings: list[Behaviour] = [settle_all(), raising(OSError(5, "I/O error"))]
        for number, ending in enumerate(endings):
            hang = scenario.hang(ending)

            def put(items: Sequence[Item], call: Call, hang: Behaviour = hang) -> None:
                call.done(0, OK)
                hang(items, call)

            scenario.backend.put = put
            job = scenario.submit_into(hang, Operation.PUT, number, 100 + number)
            scenario.pass_time(10)
            hang.let_go()
            wait(job.is_finished)
            scenario.quiet()
            assert scenario.write_breaker.state is BreakerState.CLOSED  # one failure each
        scenario.backend.put = settle_all(BROKEN)
        scenario.submit(Operation.PUT, 9)
        scenario.quiet()
        assert scenario.write_breaker.state is BreakerState.OPEN


def test_jobs_queued_when_the_breaker_opens_are_not_sent_to_the_failing_store() -> None:
    with Scenario(failures=1) as scenario:
        hang = scenario.backend.get = scenario.hang(raising(OSError("gone")))
        scenario.submit_into(hang, Operation.GET, 1)
        queued = [scenario.submit(Operation.GET, number) for number in (2, 3)]
        hang.let_go()
        for job in queued:
            assert "breaker open" in str(job.error())
            assert not job.is_prepared.is_set()
        assert len(scenario.backend.asked) == 1


def test_after_the_cool_down_one_real_call_decides() -> None:
    with Scenario(failures=1, max_in_flight=2) as scenario:
        scenario.backend.get = settle_all(BROKEN)
        scenario.submit(Operation.GET, 1)
        scenario.quiet()
        scenario.pass_time(5)
        hang = scenario.backend.get = scenario.hang(read_frames)
        trying = scenario.submit_into(hang, Operation.GET, 2)
        assert "breaker open" in str(scenario.submit(Operation.GET, 3).error())
        hang.let_go()
        assert trying.statuses() == [Status.OK]
        scenario.quiet()
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]
        changes = [event.state for event in scenario.events if isinstance(event, BreakerChanged)]
        assert changes == ["open", "half-open", "closed"]


def test_a_try_that_fails_opens_the_breaker_for_another_cool_down() -> None:
    with Scenario(failures=3) as scenario:
        scenario.backend.get = settle_all(BROKEN)
        for number in range(3):
            scenario.submit(Operation.GET, number)
            scenario.quiet()
        scenario.pass_time(5)
        assert str(scenario.submit(Operation.GET, 4).error()).endswith("broken")
        scenario.quiet()
        assert scenario.read_breaker.state is BreakerState.OPEN
        scenario.pass_time(4.9)
        assert "breaker open" in str(scenario.submit(Operation.GET, 5).error())


def test_a_try_that_finds_no_memory_leaves_the_next_one_to_decide() -> None:
    with Scenario(failures=1) as scenario:
        scenario.backend.get = settle_all(BROKEN)
        scenario.submit(Operation.GET, 1)
        scenario.quiet()
        scenario.pass_time(5)
        scenario.backend.get = read_frames
        assert scenario.submit(Operation.GET, 2, room_for=0).statuses() == [Status.FULL]
        assert scenario.submit(Operation.GET, 3).statuses() == [Status.OK]


def test_breaker_events_name_the_tier_and_the_cause() -> None:
    with Scenario(failures=1) as scenario:
        scenario.backend.put = raising(OSError(5, "I/O error"))
        scenario.submit(Operation.PUT, 1)
        scenario.quiet()
        (event,) = scenario.events
        assert isinstance(event, BreakerChanged)
        assert (event.tier, event.operation, event.state) == ("slow", "write", "open")
        assert "I/O error" in event.reason


@pytest.mark.parametrize(
    "failing", [settle_all(hiccup()), raising(ConnectionResetError(104, "reset"))], ids=["settled", "raised"]
)
def test_a_retryable_failure_is_retried_once(failing: Behaviour) -> None:
    with Scenario(retries=1) as scenario:
        scenario.backend.put = in_turn(failing, settle_all())
        assert scenario.submit(Operation.PUT, 1).statuses() == [Status.OK]
        scenario.quiet()
        assert scenario.counters["retries"] == 1


def test_only_the_failed_items_are_retried() -> None:
    with Scenario(retries=1) as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(0, OK)
            call.done(1, hiccup())
            call.done(2, BROKEN)
            call.done(3, hiccup())

        scenario.backend.put = in_turn(put, settle_all())
        job = scenario.submit(Operation.PUT, 10, 11, 12, 13)
        assert job.statuses() == [Status.OK, Status.OK, Status.FAILED, Status.OK]
        assert scenario.backend.asked[1] == ("put", [key_of(11), key_of(13)])


def test_a_second_failure_is_final() -> None:
    with Scenario(retries=5, failures=9) as scenario:
        scenario.backend.put = settle_all(hiccup())
        job = scenario.submit(Operation.PUT, 1)
        assert job.statuses() == [Status.FAILED]
        scenario.quiet()
        assert len(scenario.backend.asked) == 2


def test_without_budget_nothing_is_retried() -> None:
    with Scenario(retries=1, failures=9) as scenario:
        scenario.backend.put = settle_all(hiccup())
        for number in range(3):
            assert scenario.submit(Operation.PUT, number).statuses() == [Status.FAILED]
        scenario.quiet()
        assert len(scenario.backend.asked) == 4


def test_a_failure_that_would_repeat_is_not_retried() -> None:
    with Scenario(retries=5) as scenario:
        scenario.backend.put = settle_all(BROKEN)
        assert scenario.submit(Operation.PUT, 1).statuses() == [Status.FAILED]
        scenario.quiet()
        assert len(scenario.backend.asked) == 1


@pytest.mark.parametrize(("took_s", "calls"), [(4.9, 2), (5.0, 1)])
def test_a_retry_is_made_only_if_it_can_end_in_time(took_s: float, calls: int) -> None:
    with Scenario(retries=1) as scenario:

        def slow_hiccup(items: Sequence[Item], call: Call) -> None:
            scenario.clock.now += took_s
            call.done(0, hiccup())

        scenario.backend.put = in_turn(slow_hiccup, settle_all())
        scenario.submit(Operation.PUT, 1)
        scenario.quiet()
        assert len(scenario.backend.asked) == calls


def test_an_open_breaker_allows_no_retry() -> None:
    with Scenario(retries=1, failures=1) as scenario:
        scenario.backend.put = settle_all(hiccup())
        job = scenario.submit(Operation.PUT, 1)
        assert str(job.error()) == f"slow put {key_of(1)}: reset"
        scenario.quiet()
        assert "retries" not in scenario.counters
        assert len(scenario.backend.asked) == 1


def test_a_retry_that_hangs_ends_at_the_deadline_of_the_job() -> None:
    with Scenario(retries=1) as scenario:
        hang = scenario.hang()
        scenario.backend.put = in_turn(settle_all(hiccup()), hang)
        job = scenario.submit(Operation.PUT, 1)
        wait(hang.entered)
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT]
        hang.let_go()
        wait(job.is_finished)
        assert list(job.landings) == [0]


def test_items_that_wait_for_a_retry_time_out_with_the_rest() -> None:
    with Scenario(retries=1) as scenario:
        hang = scenario.hang(lambda items, call: call.done(1, OK))

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(0, hiccup())
            hang(items, call)

        scenario.backend.put = put
        job = scenario.submit_into(hang, Operation.PUT, 1, 2)
        assert not job.outcomes
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT] * 2
        hang.let_go()
        wait(job.is_finished)
        assert list(job.landings) == [1]
        assert len(scenario.backend.asked) == 1
