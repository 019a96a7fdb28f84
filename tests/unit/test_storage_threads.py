"""The small parts with a thread of their own: verifier, alarm, errand; and the queue that has none."""

from __future__ import annotations

import asyncio
import threading

import pytest
from executor_scenario import FakeClock
from scripted_backend import PATIENCE_S, wait

from lmcache_core.storage import Priority, Verifier
from lmcache_core.storage.alarm import Alarm
from lmcache_core.storage.errand import Errand
from lmcache_core.storage.job_queue import JobQueue

RAISED = [ValueError, asyncio.CancelledError, SystemExit, KeyboardInterrupt]


def test_checks_run_in_order_on_one_daemon_thread() -> None:
    verifier, seen, last = Verifier(), [], threading.Event()
    for number in range(20):
        verifier.submit(lambda number=number: seen.append((number, threading.current_thread())))  # type: ignore[misc]
    verifier.submit(last.set)
    wait(last)
    assert [number for number, _ in seen] == list(range(20))
    (thread,) = {thread for _, thread in seen}
    assert thread.daemon
    assert thread is not threading.current_thread()
    verifier.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("raised", RAISED)
def test_a_check_that_raises_stops_no_other(
    raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def check() -> None:
        raise raised

    verifier, done = Verifier(), threading.Event()
    verifier.submit(check)
    verifier.submit(done.set)
    wait(done)
    verifier.close()
    assert "a function on a thread of the cache's raised" in caplog.text


def test_checks_submitted_before_close_still_run_and_later_ones_run_at_once() -> None:
    verifier, go_on, seen = Verifier(), threading.Event(), []
    verifier.submit(lambda: wait(go_on))
    early = threading.Event()
    verifier.submit(early.set)
    verifier.close()
    verifier.close()
    verifier.submit(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]
    go_on.set()
    wait(early)


def test_without_a_thread_checks_run_where_they_are_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    verifier, seen = Verifier(), []
    verifier.submit(lambda: seen.append(1))
    assert seen == [1]


def test_the_alarm_rings_for_the_earliest_deadline_and_then_forgets_it() -> None:
    clock, rung = FakeClock(), threading.Semaphore(0)
    alarm = Alarm(rung.release, clock)
    alarm.start("test-alarm")
    alarm.at(clock() + 1000)
    alarm.at(clock() + 500)
    clock.now += 600
    alarm.at(clock() - 200)  # makes it look now
    assert rung.acquire(timeout=PATIENCE_S)
    alarm.at(clock() - 1)
    assert rung.acquire(timeout=PATIENCE_S)
    alarm.stop()


@pytest.mark.parametrize("raised", RAISED)
def test_an_alarm_whose_ring_raises_rings_again(
    raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    clock, rung = FakeClock(), threading.Semaphore(0)

    def ring() -> None:
        rung.release()
        raise raised

    alarm = Alarm(ring, clock)
    alarm.start("test-alarm")
    for _ in range(2):
        alarm.at(clock())
        assert rung.acquire(timeout=PATIENCE_S)
    alarm.stop()


def test_an_errand_returns_or_raises_what_its_call_did() -> None:
    errand = Errand(lambda: 42, name="test-errand")
    assert errand.wait(PATIENCE_S)
    assert errand.result() == 42
    failing = Errand(lambda: 1 / 0, name="test-errand")
    assert failing.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_an_errand_that_is_given_up_cleans_up_when_it_ends() -> None:
    let_go, cleaned_up = threading.Event(), threading.Event()
    errand = Errand(lambda: wait(let_go), name="test-errand", too_late=cleaned_up.set)
    assert not errand.wait(0)
    assert errand.give_up()
    let_go.set()
    wait(cleaned_up)
    assert not errand.give_up()


def test_the_queue_orders_by_priority_then_by_arrival() -> None:
    queue: JobQueue[str] = JobQueue()
    for entry, priority in (
        ("s1", Priority.STORE),
        ("l1", Priority.LOAD),
        ("p1", Priority.PREFETCH),
        ("l2", Priority.LOAD),
        ("s2", Priority.STORE),
    ):
        queue.push(entry, priority)
    queue.push("l0", Priority.LOAD, front=True)
    queue.remove("s1", Priority.STORE)
    assert len(queue) == 5
    assert [queue.pop() for _ in range(6)] == ["l0", "l1", "l2", "p1", "s2", None]
    assert len(queue) == 0
