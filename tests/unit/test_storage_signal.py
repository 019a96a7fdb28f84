"""What waiters wait on: told once or often, before or after the wait, and none left behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from executor_scenario import FakeClock
from scripted_backend import PATIENCE_S

from lmcache_core.storage.signal import Signal, Watched


def test_a_signal_set_before_the_wait_is_seen_at_once_and_stays_set() -> None:
    signal = Signal()
    assert not signal.is_set
    assert not signal.wait(0.0)
    signal.set()
    signal.set()
    assert signal.is_set
    assert signal.wait(0.0)
    assert signal.wait(0.0)


def test_a_waiter_is_woken_by_another_thread() -> None:
    signal = Signal()
    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(signal.wait, PATIENCE_S)
        signal.set()
        assert waited.result(PATIENCE_S)


def test_a_state_is_looked_at_again_after_each_change() -> None:
    lock, state, looked = threading.Lock(), [0], threading.Semaphore(0)
    watched = Watched(lock, FakeClock())

    def is_two() -> bool:
        looked.release()
        return state[0] == 2

    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(watched.wait_for, is_two, 1000.0 + PATIENCE_S)
        for number in (1, 2):
            assert looked.acquire(timeout=PATIENCE_S)
            with lock:
                state[0] = number
                watched.changed()
        assert waited.result(PATIENCE_S)


def test_a_wait_past_its_deadline_looks_once_and_leaves_nobody_waiting() -> None:
    watched = Watched(threading.Lock(), FakeClock())
    assert watched.wait_for(lambda: True, 0.0)
    assert not watched.wait_for(lambda: False, 0.0)
    assert watched._waiting == []
