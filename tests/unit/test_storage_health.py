"""Breaker and retry budget, by themselves."""

from __future__ import annotations

import pytest
from executor_scenario import FakeClock

from lmcache_core.storage import Breaker, BreakerState, RetryBudget


class Watched:
    """A breaker of three failures and five seconds, with the changes it told of."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.breaker = Breaker(failures=3, cool_down_s=5, clock=self.clock)
        self.changes: list[tuple[BreakerState, str]] = []
        self.breaker.watch(lambda state, reason: self.changes.append((state, reason)))

    def open(self) -> None:
        for _ in range(3):
            self.breaker.failure("gone")


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_success_starts_the_count_of_failures_anew(watched: Watched) -> None:
    for _ in range(5):
        watched.breaker.failure("gone")
        watched.breaker.failure("gone")
        watched.breaker.success()
    assert watched.breaker.state is BreakerState.CLOSED
    assert watched.changes == []


def test_the_last_failure_of_a_row_opens_it(watched: Watched) -> None:
    watched.open()
    assert watched.breaker.state is BreakerState.OPEN
    assert watched.breaker.refusing
    assert not watched.breaker.allow()
    assert watched.changes == [(BreakerState.OPEN, "gone")]


def test_half_open_lets_one_call_through_at_a_time(watched: Watched) -> None:
    watched.open()
    watched.clock.now += 5
    assert not watched.breaker.refusing
    assert watched.breaker.state is BreakerState.OPEN  # asking claims nothing
    assert watched.breaker.allow()
    assert watched.breaker.state is BreakerState.HALF_OPEN
    assert not watched.breaker.allow()
    watched.breaker.success()
    assert watched.breaker.allow()
    assert [state.value for state, _ in watched.changes] == ["open", "half-open", "closed"]


def test_one_failure_in_half_open_opens_it_again(watched: Watched) -> None:
    watched.open()
    watched.clock.now += 5
    assert watched.breaker.allow()
    watched.clock.now += 4
    watched.breaker.failure("still gone")
    watched.clock.now += 4.9
    assert not watched.breaker.allow()
    watched.clock.now += 0.1
    assert watched.breaker.allow()


def test_a_try_that_never_reports_does_not_wedge_it(watched: Watched) -> None:
    watched.open()
    watched.clock.now += 5
    assert watched.breaker.allow()
    watched.clock.now += 5
    assert watched.breaker.allow()
    assert [state.value for state, _ in watched.changes] == ["open", "half-open"]


def test_stragglers_of_the_time_before_change_nothing(watched: Watched) -> None:
    watched.open()
    watched.clock.now += 3
    watched.breaker.failure("a straggler")
    watched.breaker.success()
    assert watched.breaker.state is BreakerState.OPEN
    watched.clock.now += 2
    assert watched.breaker.allow()


def test_a_retry_budget_is_a_share_of_the_calls() -> None:
    budget = RetryBudget(ratio=0.25, most=2)
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]
    for _ in range(3):
        budget.record_call()
    assert not budget.try_spend()
    budget.record_call()
    assert budget.try_spend()
    for _ in range(100):
        budget.record_call()
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]
