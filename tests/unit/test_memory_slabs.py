"""Where frames lie: size classes, the fullest slab first, runs of grains, the short last grain."""

from __future__ import annotations

import pytest

from lmcache_core.errors import ConfigError, PoolFull
from lmcache_core.memory import Lease, MemoryPool

KIB = 1024
GRAIN = 64 * KIB


def pool_of(capacity_bytes: int, **options: int) -> MemoryPool:
    return MemoryPool(capacity_bytes, slab_nbytes=options.pop("slab_nbytes", GRAIN), **options)


def fill(pool: MemoryPool, nbytes: int) -> list[Lease]:
    leases = []
    while (lease := pool.try_allocate(nbytes, owner="test")) is not None:
        leases.append(lease)
    return leases


def release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()


def test_memory_starts_at_a_huge_page_and_slots_at_pages() -> None:
    pool = pool_of(1 << 20)
    leases = [pool.try_allocate(nbytes, owner="test") for nbytes in (1, 4096, 4097, 50_000)]
    assert pool.base_address % (2 << 20) == 0
    for lease in leases:
        assert lease is not None
        assert lease.offset % 4096 == 0
        assert lease.address == pool.base_address + lease.offset
        assert len(lease.memory) == lease.nbytes
        lease.memory[-1] = 7
        assert pool.buffer[lease.offset + lease.nbytes - 1] == 7
        lease.release()
    pool.check()


def test_frames_that_divide_the_slab_use_every_byte() -> None:
    pool = pool_of(16 * GRAIN)
    leases = fill(pool, GRAIN // 4)
    assert len(leases) == 64
    assert pool.stats().used_bytes == pool.capacity_bytes
    pool.check()
    release(leases)
    assert pool.stats().used_bytes == 0


def test_frames_that_waste_a_grain_share_a_run_of_grains() -> None:
    pool = pool_of(64 * GRAIN)
    frame = GRAIN * 3 // 4  # alone in a grain it would waste a quarter
    leases = fill(pool, frame)
    assert len(leases) * frame > pool.capacity_bytes * 7 // 8
    pool.check()
    release(leases)


def test_a_frame_larger_than_a_grain_lies_in_adjacent_grains() -> None:
    pool = pool_of(16 * GRAIN)
    leases = fill(pool, 3 * GRAIN)
    assert len(leases) == 5
    pool.check()
    release(leases)


@pytest.mark.parametrize("capacity", [4 * GRAIN + 8 * KIB, 4 * GRAIN + 40 * KIB, GRAIN - 4096, 4096])
def test_a_frame_as_large_as_the_pool_fits_whatever_the_last_grain_holds(capacity: int) -> None:
    pool = pool_of(capacity)
    lease = pool.try_allocate(capacity, owner="test")
    assert lease is not None
    assert (lease.offset, lease.nbytes) == (0, capacity)
    pool.check()
    lease.release()
    pool.check()


def test_small_frames_use_the_short_last_grain_too() -> None:
    pool = pool_of(4 * GRAIN + 12 * KIB)
    leases = fill(pool, 4 * KIB)
    assert len(leases) * 4 * KIB == pool.capacity_bytes
    pool.check()
    release(leases)


def test_capacity_is_rounded_down_to_pages() -> None:
    assert MemoryPool(10 * 4096 + 4095).capacity_bytes == 10 * 4096


def test_new_frames_fill_the_fullest_slab_first() -> None:
    pool = pool_of(4 * GRAIN)
    leases = fill(pool, GRAIN // 8)
    by_slab = [leases[i : i + 8] for i in range(0, 32, 8)]
    for slab, count in zip(by_slab, (5, 2, 7, 4), strict=True):
        release(slab[:count])
    places = []
    for _ in range(6):
        lease = pool.try_allocate(GRAIN // 8, owner="test")
        assert lease is not None
        places.append(lease.offset // GRAIN)
        leases.append(lease)
    assert places == [1, 1, 3, 3, 3, 3]
    pool.check()
    release([lease for lease in leases if not lease.released])


def test_a_slab_without_frames_serves_any_class() -> None:
    pool = pool_of(4 * GRAIN)
    release(fill(pool, 4 * KIB))
    release(fill(pool, GRAIN // 2))
    lease = pool.try_allocate(4 * GRAIN, owner="test")
    assert lease is not None
    lease.release()
    pool.check()


def test_a_slightly_smaller_frame_shares_the_class_and_a_much_smaller_one_does_not() -> None:
    pool = pool_of(8 * GRAIN)
    whole = pool.try_allocate(GRAIN, owner="test")
    near = pool.try_allocate(GRAIN - GRAIN // 8, owner="test")
    far = pool.try_allocate(GRAIN - GRAIN // 4, owner="test")
    assert whole is not None
    assert near is not None
    assert far is not None
    assert [lease.slot_nbytes for lease in (whole, near, far)] == [GRAIN, GRAIN, GRAIN * 3 // 4]
    release([whole, near, far])


def test_a_larger_class_is_not_shared_where_only_the_exact_size_leaves_the_reserve_alone() -> None:
    pool = pool_of(8 * GRAIN, reserved_bytes=8 * KIB)
    load = pool.allocate(4 * GRAIN, owner="load", deadline=0.0, reserve=True)
    store = pool.allocate(4 * GRAIN - 8 * KIB, owner="store", deadline=0.0)
    assert store.slot_nbytes == store.nbytes
    release([load, store])


def test_a_frame_larger_than_the_pool_is_refused_at_once_with_the_sizes() -> None:
    pool = pool_of(4 * GRAIN)
    with pytest.raises(PoolFull, match=f"{5 * GRAIN} bytes can't fit the memory pool of {4 * GRAIN}"):
        pool.allocate(5 * GRAIN, owner="test", deadline=float("inf"))
    assert pool.stats().refused == 1


def test_a_frame_larger_than_the_unreserved_part_is_refused_at_once() -> None:
    pool = pool_of(4 * GRAIN, reserved_bytes=GRAIN)
    with pytest.raises(PoolFull, match="reserved for loads"):
        pool.allocate(4 * GRAIN, owner="test", deadline=float("inf"))
    pool.allocate(4 * GRAIN, owner="test", deadline=0.0, reserve=True).release()


def test_the_reserved_part_serves_only_allocations_with_reserve() -> None:
    pool = pool_of(8 * GRAIN, reserved_bytes=2 * GRAIN)
    stores = fill(pool, GRAIN)
    assert len(stores) == 6
    with pytest.raises(PoolFull, match=f"{2 * GRAIN} are reserved for loads"):
        pool.allocate(GRAIN, owner="store", deadline=0.0)
    loads = [pool.allocate(GRAIN, owner="load", deadline=0.0, reserve=True) for _ in range(2)]
    assert pool.try_allocate(GRAIN, owner="load", reserve=True) is None
    release(loads + stores)
    pool.check()


def test_what_is_only_held_does_not_count_against_the_reserve() -> None:
    pool = pool_of(8 * GRAIN, reserved_bytes=2 * GRAIN)
    holds = []
    for _ in range(8):
        with pool.allocate(GRAIN, owner="store", deadline=0.0) as lease:
            holds.append(lease.hold())
    assert pool.stats().held_bytes == 8 * GRAIN
    for hold in holds:
        hold.drop()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_of_nothing_is_a_programming_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match="can't allocate"):
        pool_of(GRAIN).try_allocate(nbytes, owner="test")


@pytest.mark.parametrize(
    ("capacity", "options", "message"),
    [
        (4095, {}, "at least 4096"),
        (1 << 20, {"slab_nbytes": 4095}, "slab_nbytes"),
        (1 << 20, {"slab_nbytes": 0}, "slab_nbytes"),
        (1 << 20, {"reserved_bytes": 1 << 20}, "reserved_bytes"),
        (1 << 20, {"reserved_bytes": -1}, "reserved_bytes"),
        (1 << 62, {}, "can't be mapped"),
    ],
)
def test_sizes_that_cannot_work_are_refused(capacity: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryPool(capacity, **options)


@pytest.mark.parametrize("capacity", [4096, 100_000, 1 << 20, 100 << 20, 3 << 30])
def test_the_default_slab_suits_pools_of_any_size(capacity: int) -> None:
    pool = MemoryPool(capacity)
    lease = pool.try_allocate(4096, owner="test")
    assert lease is not None
    lease.release()
    pool.check()
    pool.close()
