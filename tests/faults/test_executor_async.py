"""Backends that return before their items are settled: what they hold is theirs until they say so."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from executor_scenario import Scenario
from scripted_backend import FRAME_NBYTES, OK, fill, frame_of, wait

from lmcache_core.errors import BackendError, BackendUnavailable
from lmcache_core.storage import Call, Capabilities, Item, Operation, Outcome, Status

ASYNCHRONOUS = Capabilities(asynchronous=True, max_in_flight=64)


class Driver:
    """Takes calls and returns at once; `take` waits for the next one to complete by hand."""

    def __init__(self) -> None:
        self._calls: list[tuple[Sequence[Item], Call]] = []
        self._came = threading.Condition()

    def __call__(self, items: Sequence[Item], call: Call) -> None:
        with self._came:
            self._calls.append((items, call))
            self._came.notify_all()

    def take(self) -> tuple[Sequence[Item], Call]:
        with self._came:
            assert self._came.wait_for(lambda: self._calls, 30)
            return self._calls.pop(0)


def test_items_settle_after_the_method_returned() -> None:
    with Scenario(offers=ASYNCHRONOUS) as scenario:
        driver = scenario.backend.get = Driver()
        job = scenario.submit(Operation.GET, 1, 2)
        items, call = driver.take()
        for index in (1, 0):
            assert not job.is_finished.is_set()
            fill(items[index], frame_of(index + 1))
            call.done(index, Outcome(status=Status.OK, nbytes=FRAME_NBYTES))
        assert job.statuses() == [Status.OK, Status.OK]
        wait(job.is_finished)


def test_a_slot_is_taken_until_every_item_is_settled() -> None:
    with Scenario(offers=ASYNCHRONOUS, max_in_flight=2) as scenario:
        driver = scenario.backend.put = Driver()
        jobs = [scenario.submit(Operation.PUT, number) for number in range(3)]
        first, second = driver.take(), driver.take()
        traffic = scenario.executor.stats().traffic
        assert (traffic.running, traffic.queued) == (2, 1)
        first[1].done(0, OK)
        _, third = driver.take()
        third.done(0, OK)
        second[1].done(0, OK)
        assert [job.statuses() for job in jobs] == [[Status.OK]] * 3


def test_unsettled_items_time_out_and_stay_quarantined_until_the_driver_lets_go() -> None:
    with Scenario(offers=ASYNCHRONOUS) as scenario:
        driver = scenario.backend.put = Driver()
        job = scenario.submit(Operation.PUT, 1, 2)
        _, call = driver.take()
        call.done(0, OK)
        scenario.pass_time(10)
        assert job.statuses() == [Status.OK, Status.TIMEOUT]
        assert not job.is_finished.is_set()
        assert "busy: no call returns" in str(scenario.submit(Operation.PUT, 3).error())
        call.done(1, OK)
        assert job.is_finished.is_set()
        assert list(job.landings) == [1]
        assert scenario.executor.stats().traffic.stuck == 0


def test_an_exception_ends_what_is_unsettled_even_so() -> None:
    with Scenario(offers=ASYNCHRONOUS) as scenario:
        calls: list[Call] = []

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(0, OK)
            calls.append(call)
            raise OSError(5, "submission queue broke")

        scenario.backend.put = put
        job = scenario.submit(Operation.PUT, 1, 2)
        assert job.statuses() == [Status.OK, Status.FAILED]
        wait(job.is_finished)
        calls[0].done(1, OK)
        assert scenario.counters["repeated_settlements"] == 1


def test_a_failed_item_is_retried_once_the_others_are_settled() -> None:
    with Scenario(offers=ASYNCHRONOUS, retries=1) as scenario:
        driver = scenario.backend.put = Driver()
        job = scenario.submit(Operation.PUT, 1, 2)
        _, call = driver.take()
        call.done(0, Outcome(status=Status.FAILED, error=BackendUnavailable("reset")))
        assert not job.outcomes
        call.done(1, OK)
        items, again = driver.take()
        assert len(items) == 1
        again.done(0, OK)
        assert job.statuses() == [Status.OK, Status.OK]
        call.done(0, OK)  # the first call is over
        assert scenario.counters["repeated_settlements"] == 1


def test_closing_settles_what_the_driver_never_settles() -> None:
    with Scenario(offers=ASYNCHRONOUS) as scenario:
        driver = scenario.backend.put = Driver()
        job = scenario.submit(Operation.PUT, 1)
        _, call = driver.take()
        scenario.executor.close(scenario.clock())
        assert job.statuses() == [Status.FAILED]
        assert isinstance(job.error(), BackendError)
        assert not job.is_finished.is_set()
        call.done(0, OK)
        assert job.is_finished.is_set()
        assert list(job.landings) == [0]
