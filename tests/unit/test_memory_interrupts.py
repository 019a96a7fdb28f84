"""Ctrl-C on the thread that uses the pool, at every place where it can come."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from interruption import interrupt_at

from lmcache_core.memory import Hold, MemoryPool

KIB = 1024
PATIENCE_S = 30.0


class Oldest:
    """A reclaimer that evicts what was stored first."""

    def __init__(self) -> None:
        self.holds: dict[Hold, None] = {}

    def coldest(self, slot_nbytes: int) -> int | None:
        return 0 if self._first(slot_nbytes) is not None else None

    def evict_coldest(self, slot_nbytes: int) -> bool:
        hold = self._first(slot_nbytes)
        return hold is not None and self.evict([hold]) > 0

    def evict(self, holds: Sequence[Hold]) -> int:
        if any(hold.leased for hold in holds):
            return 0
        for hold in holds:
            self.holds.pop(hold, None)
        return sum(hold.evict() for hold in holds)

    def _first(self, slot_nbytes: int) -> Hold | None:
        return next((h for h in self.holds if h.slot_nbytes == slot_nbytes and not h.leased), None)


def use(pool: MemoryPool, resident: Oldest, waiting: list[Hold], told: list[Hold]) -> None:
    """Allocates, shares, holds, evicts, drains slabs, takes larger slots, and gives all leases back."""
    for nbytes in [16 * KIB] * 6 + [8 * KIB, 64 * KIB, 64 * KIB, 128 * KIB]:
        with pool.allocate(nbytes, owner="store", deadline=0) as lease:
            resident.holds[lease.hold()] = None
            if nbytes == 16 * KIB:
                waiting.append(lease.hold(None, told.append))
    with pool.allocate(16 * KIB, owner="load", deadline=0) as lease, lease.share("reader") as reader:
        reader.memory[:1] = b"x"
        lease.hold().drop()
    pool.wake()
    pool.stats()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="knows where CPython 3.11 looks for signals")
@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace function that another tool has")
def test_ctrl_c_leaves_no_lock_no_drain_and_no_lease_wherever_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)  # some of it comes inside `__del__`
    number = 0
    while True:
        pool, resident = MemoryPool(256 * KIB, slab_nbytes=64 * KIB), Oldest()
        waiting: list[Hold] = []
        told: list[Hold] = []
        pool.attach(resident)
        where = interrupt_at(
            number,
            "lmcache_core.memory",
            lambda: use(pool, resident, waiting, told),  # noqa: B023
        )
        if where is None:
            break
        assert not pool._ledger.lock.locked(), where
        assert not pool._ledger.draining, where
        gc.collect(0)
        assert pool.stats().leases == 0, where
        resident.holds.clear()
        waiting.clear()
        told.clear()
        assert pool.stats().holds == 0, where
        pool.allocate(16 * KIB, owner="after", deadline=0).release()
        number += 3  # most code runs several times, and so is cut everywhere
    assert number > 1000


def test_ctrl_c_while_an_allocation_waits_leaves_the_pool_usable() -> None:
    pool = MemoryPool(16 * KIB, slab_nbytes=16 * KIB)
    taken = pool.allocate(16 * KIB, owner="first", deadline=0)
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        if now[0] > 3:
            raise KeyboardInterrupt
        return 0.0

    pool._clock = clock
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(16 * KIB, owner="second", deadline=0.01)
    pool._clock = lambda: 0.0
    taken.release()
    with ThreadPoolExecutor(1) as threads:
        lease = threads.submit(pool.allocate, 16 * KIB, owner="third", deadline=0.0).result(PATIENCE_S)
    lease.release()
    pool.check()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_all_waiting_writes_of_an_evicted_frame_are_told_whatever_one_of_them_raises(
    raised: type[BaseException],
) -> None:
    pool = MemoryPool(64 * KIB, slab_nbytes=64 * KIB)
    told: list[Hold] = []

    def fail(hold: Hold) -> None:
        told.append(hold)
        raise raised

    with pool.allocate(16 * KIB, owner="store", deadline=0) as lease:
        resident = lease.hold()
        waiting = [lease.hold(None, on_evict) for on_evict in (fail, told.append, fail)]
    with pytest.raises(raised):
        resident.evict()
    assert told == waiting
    assert pool.stats().holds == 0
