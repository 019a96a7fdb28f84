"""Holds: references to bytes that eviction may take, and who wins when a lease races with it."""

from __future__ import annotations

import pytest
from small_pool import FRAME, allocate, at_once, small_pool, used

from lmcache_core.identity.keys import storage_key
from lmcache_core.memory import Hold, Lease, MemoryPool


@pytest.fixture
def pool() -> MemoryPool:
    return small_pool()


def test_a_hold_keeps_the_bytes_without_a_lease(pool: MemoryPool) -> None:
    key = storage_key("c-0")
    with allocate(pool, 10_000) as lease:
        lease.memory[9_999] = 5
        hold = lease.hold(key)
        assert hold.leased
    assert (hold.tag, hold.nbytes, hold.slot_nbytes, hold.leased) == (key, 10_000, 12 * 1024, False)
    with hold.lease("reader") as again:
        assert again.memory[9_999] == 5
        assert hold.leased
    assert pool.stats().held_bytes == 12 * 1024
    hold.drop()
    assert used(pool) == 0


def test_dropping_twice_is_fine_and_a_dropped_hold_leases_nothing(pool: MemoryPool) -> None:
    with allocate(pool) as lease:
        hold = lease.hold()
    hold.drop()
    hold.drop()
    assert hold.lease("x") is None
    assert not hold.alive
    assert used(pool) == 0


def test_a_lease_outlives_the_hold_it_came_from(pool: MemoryPool) -> None:
    with allocate(pool) as lease:
        hold = lease.hold()
    with hold.lease("reader") or pytest.fail("no lease"):
        hold.drop()
        assert used(pool) == FRAME
    assert used(pool) == 0


def test_a_hold_that_nobody_keeps_is_dropped(pool: MemoryPool) -> None:
    with allocate(pool) as lease:
        hold = lease.hold()
    assert used(pool) == FRAME
    del hold
    assert used(pool) == 0


def test_eviction_skips_a_leased_frame_and_takes_an_unleased_one(pool: MemoryPool) -> None:
    with allocate(pool) as lease:
        hold = lease.hold()
        assert not hold.evict()
        assert hold.alive
    assert hold.evict()
    assert not hold.evict()
    assert hold.lease("late") is None
    assert used(pool) == 0


def test_evicting_a_frame_ends_the_writes_that_wait_for_it(pool: MemoryPool) -> None:
    told: list[Hold] = []
    with allocate(pool) as lease:
        resident, waiting = lease.hold(), lease.hold(on_evict=told.append)
    assert resident.evict()
    assert told == [waiting]
    assert waiting.lease("writer") is None
    assert used(pool) == 0


def test_evicting_one_of_two_residents_ends_only_that_one(pool: MemoryPool) -> None:
    told: list[Hold] = []
    with allocate(pool) as lease:
        one, other, waiting = lease.hold(), lease.hold(), lease.hold(on_evict=told.append)
    assert one.evict()
    assert (other.alive, waiting.alive, told) == (True, True, [])
    assert other.evict()
    assert told == [waiting]


def test_a_callback_of_eviction_may_use_the_pool(pool: MemoryPool) -> None:
    def on_evict(hold: Hold) -> None:
        assert hold.lease("callback") is None
        allocate(pool).release()
        pool.check()

    with allocate(pool) as lease:
        resident, waiting = lease.hold(), lease.hold(on_evict=on_evict)
    assert resident.evict()
    assert not waiting.alive


def test_a_lease_and_an_eviction_that_race_have_one_winner(pool: MemoryPool) -> None:
    for _ in range(300):
        with allocate(pool) as lease:
            hold = lease.hold()
        evicted, taken = at_once(hold.evict, lambda hold=hold: hold.lease("reader"))
        assert evicted == (taken is None)
        if isinstance(taken, Lease):
            assert hold.alive
            taken.release()
            hold.drop()
        assert used(pool) == 0
