"""Slots, queue and bytes of a tier, by themselves: the orders of events that threads seldom produce."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from executor_scenario import FakeClock, RecordingJob
from scripted_backend import PATIENCE_S

from lmcache_core.storage import Operation, Outcome, Status
from lmcache_core.storage.traffic import Traffic
from lmcache_core.storage.transfer import Transfer

NBYTES = 4096


class Owner:
    """The executor of transfers that never run."""

    tier = "slow"
    now = FakeClock()

    def count(self, what: str) -> None:
        raise AssertionError(what)

    def verify(self, check: Callable[[], None]) -> None:
        raise AssertionError

    def attempt_over(self, transfer: Any, attempt: Any) -> None:
        raise AssertionError

    def __init__(self) -> None:
        self.num_finished = 0

    def transfer_finished(self, transfer: Any) -> None:
        self.num_finished += 1


def transfer(*, deadline: float = 2000.0) -> Transfer:
    return Transfer(RecordingJob(Operation.PUT, [1], deadline=deadline, nbytes=NBYTES), Owner())


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(max_in_flight=1, in_flight_bytes=2 * NBYTES, queue_limit=2)


def gauges(traffic: Traffic) -> tuple[int, int, int, int]:
    stats = traffic.stats()
    return stats.queued, stats.running, stats.stuck, stats.in_flight_bytes // NBYTES


def test_a_transfer_is_counted_from_admission_to_its_end(traffic: Traffic) -> None:
    one = transfer()
    assert traffic.admit(one) == ""
    assert gauges(traffic) == (1, 0, 0, 1)
    assert traffic.next() is one
    assert gauges(traffic) == (0, 1, 0, 1)
    traffic.mark_stuck(one)
    traffic.mark_stuck(one)
    assert gauges(traffic) == (0, 1, 1, 1)
    assert traffic.hung
    traffic.leave_slot(one)
    traffic.leave_slot(one)
    assert gauges(traffic) == (0, 0, 0, 1)
    traffic.finish(one)
    assert gauges(traffic) == (0, 0, 0, 0)


def test_a_transfer_let_go_just_before_it_is_called_stuck_is_not_stuck(traffic: Traffic) -> None:
    one = transfer()
    traffic.admit(one)
    traffic.next()
    traffic.leave_slot(one)
    traffic.mark_stuck(one)
    assert gauges(traffic) == (0, 0, 0, 1)


def test_a_refused_transfer_changes_nothing(traffic: Traffic) -> None:
    for _ in range(2):
        assert traffic.admit(transfer()) == ""
    refused = transfer()
    assert "2 jobs wait" in traffic.admit(refused)
    traffic.finish(refused)
    assert gauges(traffic) == (2, 0, 0, 2)


def test_a_requeued_transfer_goes_first_and_gives_its_slot_back(traffic: Traffic) -> None:
    first, second = transfer(), transfer()
    traffic.admit(first)
    traffic.admit(second)
    assert traffic.next() is first
    assert traffic.requeue(first)
    assert gauges(traffic) == (2, 0, 0, 2)
    assert traffic.next() is first


def test_a_transfer_past_its_deadline_or_after_close_is_not_requeued(traffic: Traffic) -> None:
    late, other = transfer(deadline=1000.0), transfer()
    traffic.admit(late)
    traffic.admit(other)
    assert traffic.next() is late
    assert traffic.take_due(1000.0) == ([], [late], 2000.0)
    assert traffic.take_due(1000.0) == ([], [], 2000.0)
    assert not traffic.requeue(late)
    assert traffic.next() is other
    traffic.close()
    assert not traffic.requeue(other)
    assert gauges(traffic) == (0, 0, 0, 2)
    assert traffic.next() is None


def test_due_transfers_leave_the_queue(traffic: Traffic) -> None:
    due, later = transfer(deadline=1000.0), transfer(deadline=1500.0)
    traffic.admit(due)
    traffic.admit(later)
    assert traffic.take_due(1000.0) == ([due], [], 1500.0)
    assert traffic.withdraw(due.job) is None
    assert traffic.withdraw(later.job) is later
    assert gauges(traffic) == (0, 0, 0, 2)


def test_threads_are_claimed_only_as_far_as_jobs_wait_and_slots_allow(traffic: Traffic) -> None:
    claim: list[int] = []
    traffic.claim_thread(claim)
    assert claim == []
    traffic.admit(transfer())
    traffic.claim_thread(claim)
    assert claim == [1]
    traffic.admit(transfer())
    traffic.claim_thread(claim)
    assert claim == [1]
    assert len(traffic.unclaim_thread()) == 2
    assert traffic.stats().threads == 0


def test_a_transfer_given_up_when_it_has_just_finished_does_not_finish_again() -> None:
    owner = Owner()
    job = RecordingJob(Operation.PUT, [1], deadline=2000.0)
    one = Transfer(job, owner)
    for _ in range(2):  # the alarm saw it while it ran, and comes too late
        assert not one.give_up(Outcome(status=Status.FULL))
        if not owner.num_finished:
            one.release()
    assert owner.num_finished == 1
    assert job.faults == []


def test_who_waits_for_quiet_is_told_when_the_last_that_is_not_stuck_ends() -> None:
    traffic = Traffic(max_in_flight=2, in_flight_bytes=2 * NBYTES, queue_limit=2)
    stuck, running = transfer(), transfer()
    for one in (stuck, running):
        traffic.admit(one)
        assert traffic.next() is one
    traffic.close()
    traffic.mark_stuck(stuck)
    left: list[list[Transfer]] = []
    waiter = threading.Thread(target=lambda: left.append(traffic.wait_quiet(10 * PATIENCE_S)), daemon=True)
    waiter.start()
    deadline = time.monotonic() + PATIENCE_S
    while not traffic._quiet._waiting and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    traffic.leave_slot(running)
    traffic.finish(running)
    waiter.join(PATIENCE_S)
    assert left == [[stuck]]
