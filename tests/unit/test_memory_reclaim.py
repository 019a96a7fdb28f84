"""Making room: what leaves a full pool, and what stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lru import KIB, SLAB, Lru, pool_of

from lmcache_core.errors import ConfigError, PoolFull
from lmcache_core.identity.keys import StorageKey, storage_key
from lmcache_core.memory import Hold, MemoryPool


@pytest.fixture
def pool() -> MemoryPool:
    return pool_of(8)


@pytest.fixture
def lru(pool: MemoryPool) -> Lru:
    return Lru(pool)


@pytest.mark.parametrize(
    ("small", "large"), [(12 * KIB, 20 * KIB), (4 * KIB, 60 * KIB), (20 * KIB, 150 * KIB)]
)
@pytest.mark.parametrize("burst", [1, 40])
def test_two_models_that_alternate_in_a_full_pool_are_never_refused(
    small: int, large: int, burst: int
) -> None:
    pool = pool_of(64)
    lru = Lru(pool)
    hot = [lru.store(f"hot-{i}", small) for i in range(4)]
    parents: dict[int, str | None] = {small: None, large: None}
    for number in range(10_000):
        nbytes = small if number // burst % 2 else large
        name = f"m{nbytes}-{number}"
        parent = parents[nbytes] if number % 8 else None
        lru.store(name, nbytes, parent=parent)  # raises PoolFull if refused
        parents[nbytes] = name
        if number % 10 == 0:
            assert all(lru.read(key) is not None for key in hot)
        if number % 1000 == 0:
            pool.check()
    pool.check()
    stats = pool.stats()
    assert (stats.refused, stats.leases, stats.lost_leases) == (0, 0, 0)
    assert stats.used_bytes > pool.capacity_bytes // 2
    assert {resident.hold.nbytes for resident in lru.residents.values()} == {small, large}
    for key in list(lru.residents):
        assert lru.read(key) == key.encode()


def test_one_leased_frame_in_each_slab_still_lets_its_class_evict(pool: MemoryPool, lru: Lru) -> None:
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    leases = [lru.residents[storage_key(f"f-{number}")].hold.lease("load") for number in range(0, 32, 4)]
    for number in range(200):
        lru.store(f"g-{number}", SLAB // 4)
    assert all(lru.read(f"f-{number}") == f"f-{number}".encode() for number in range(0, 32, 4))
    assert pool.stats().drained_slabs == 0
    for lease in leases:
        assert lease is not None
        lease.release()
    pool.check()


def test_one_leased_frame_in_each_slab_lets_a_smaller_class_use_a_larger_slot(
    pool: MemoryPool, lru: Lru
) -> None:
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    leases = [lru.residents[storage_key(f"f-{number}")].hold.lease("load") for number in range(0, 32, 4)]
    with pool.allocate(4 * KIB, owner="tail", deadline=0.0) as tail:
        assert tail.slot_nbytes == SLAB // 4
    assert lru.num_evicted == 1
    for lease in leases:
        assert lease is not None
        lease.release()


def test_a_larger_slot_comes_free_once_all_residents_of_its_frame_have_gone(
    pool: MemoryPool, lru: Lru
) -> None:
    leases = []
    for number in range(32):
        lease = pool.allocate(SLAB // 4, owner="store", deadline=0.0)
        for name in ("first", "second"):
            lru.admit(storage_key(f"{name}-{number}"), lease)
        if number % 4:
            lease.release()
        else:
            leases.append(lease)
    with pool.allocate(4 * KIB, owner="tail", deadline=0.0) as tail:
        assert tail.slot_nbytes == SLAB // 4
    assert lru.num_evicted == 2
    for lease in leases:
        lease.release()


def test_the_coldest_slab_of_another_class_leaves_before_a_warmer_frame(pool: MemoryPool, lru: Lru) -> None:
    for number in range(24):
        lru.store(f"cold-{number}", SLAB // 4)
    for number in range(4):
        lru.store(f"warm-{number}", SLAB // 2)
    for number in range(4, 16):
        lru.read(f"cold-{number}")
    lru.store("new", SLAB // 2)
    kept = [number for number in range(24) if storage_key(f"cold-{number}") in lru.residents]
    assert kept == list(range(4, 24))
    assert all(storage_key(f"warm-{number}") in lru.residents for number in range(4))


def test_the_coldest_frame_of_the_class_leaves_before_a_warmer_slab(pool: MemoryPool, lru: Lru) -> None:
    for number in range(4):
        lru.store(f"cold-{number}", SLAB // 2)
    for number in range(24):
        lru.store(f"warm-{number}", SLAB // 4)
    lru.store("new", SLAB // 2)
    assert lru.num_evicted == 1
    assert storage_key("cold-0") not in lru.residents


def test_a_slab_is_as_cold_as_its_warmest_frame_that_is_left(pool: MemoryPool, lru: Lru) -> None:
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    for number in range(4, 32):
        lru.read(f"f-{number}")
    lru.read("f-0")  # the hottest of all, in the first slab ...
    lru._take(storage_key("f-0")).hold.drop()  # ... which leaves by itself
    lru.store("new", SLAB)
    assert [n for n in range(32) if storage_key(f"f-{n}") not in lru.residents] == [0, 1, 2, 3]


def test_a_slab_with_a_pinned_frame_stays_whole(pool: MemoryPool, lru: Lru) -> None:
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    lru.pinned = {storage_key("f-0"), storage_key("f-5")}
    lru.store("new", SLAB)
    assert [n for n in range(32) if storage_key(f"f-{n}") not in lru.residents] == [8, 9, 10, 11]


def test_pins_everywhere_refuse_and_cost_nobody_a_frame(pool: MemoryPool, lru: Lru) -> None:
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    lru.pinned = {storage_key(f"f-{number}") for number in range(0, 32, 4)}
    with pytest.raises(PoolFull):
        pool.allocate(SLAB, owner="store", deadline=0.0)
    assert len(lru.residents) == 32
    lru.pinned.clear()
    pool.allocate(SLAB, owner="store", deadline=0.0).release()


def test_a_reclaimer_that_evicts_by_halves_is_not_asked_to_ruin_every_slab(pool: MemoryPool) -> None:
    class Careless(Lru):
        def evict(self, holds: Sequence[Hold]) -> int:
            with self.lock:
                taken = [self._take(hold.tag) for hold in holds if hold.tag not in self.pinned]
            self.num_evicted += len(taken)
            return sum(resident.hold.evict() for resident in taken)

        def evict_coldest(self, slot_nbytes: int) -> bool:
            return False

    lru = Careless(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    lru.pinned = {storage_key(f"f-{number}") for number in range(0, 32, 4)}
    with pytest.raises(PoolFull):
        pool.allocate(SLAB, owner="store", deadline=0.0)
    assert lru.num_evicted <= 12
    pool.check()


def test_a_parent_in_the_drained_slab_takes_its_children_in_other_slabs_along(
    pool: MemoryPool, lru: Lru
) -> None:
    for number in range(4):
        lru.store(f"parent-{number}", SLAB // 4)
    for number in range(28):
        lru.store(f"child-{number}", SLAB // 4, parent="parent-2" if number == 20 else None)
    lru.store("new", SLAB)
    gone = {f"parent-{number}" for number in range(4)} | {"child-20"}
    names = {f"parent-{n}" for n in range(4)} | {f"child-{n}" for n in range(28)}
    assert names - set(lru.residents) == gone
    pool.check()


def test_a_frame_whose_child_has_another_size_leaves_with_it(pool: MemoryPool, lru: Lru) -> None:
    for number in range(7):
        lru.store(f"chunk-{number}", SLAB)
        lru.store(f"tail-{number}", 4 * KIB, parent=f"chunk-{number}")
    lru.store("chunk-7", SLAB)
    assert set(lru.residents) == {f"{kind}-{n}" for kind in ("chunk", "tail") for n in range(1, 7)} | {
        "chunk-7"
    }


def test_frames_that_only_leave_with_a_child_of_another_size_are_asked_for_by_name(pool: MemoryPool) -> None:
    class Childless(Lru):
        """Offers only frames without children, so none of the chunks here."""

        def _candidate(self, slot_nbytes: int) -> StorageKey | None:
            key = super()._candidate(slot_nbytes)
            return None if key is None or self.residents[key].children else key

    lru = Childless(pool)
    for number in range(20):
        lru.store(f"chunk-{number}", 2 * SLAB)
        lru.store(f"tail-{number}", 4 * KIB, parent=f"chunk-{number}")
    assert set(lru.residents) >= {"chunk-18", "tail-18", "chunk-19", "tail-19"}
    assert pool.stats().refused == 0
    pool.check()


def test_a_frame_larger_than_a_slab_evicts_adjacent_slabs(pool: MemoryPool, lru: Lru) -> None:
    for number in range(8):
        lru.store(f"f-{number}", SLAB)
    leases = [lru.residents[storage_key(f"f-{number}")].hold.lease("load") for number in (1, 5)]
    lru.store("new", 3 * SLAB)
    assert [n for n in range(8) if storage_key(f"f-{n}") not in lru.residents] == [2, 3, 4]
    for lease in leases:
        assert lease is not None
        lease.release()
    pool.check()


def test_a_frame_as_large_as_the_pool_evicts_everything(pool: MemoryPool, lru: Lru) -> None:
    for number in range(32):
        lru.store(f"f-{number}", (1 + number % 3) * 8 * KIB)
    lru.store("whole", 8 * SLAB)
    assert list(lru.residents) == ["whole"]


def test_waiting_writes_are_shed_when_nothing_else_can_leave() -> None:
    pool = pool_of(1)
    told: list[Hold] = []
    holds = []
    for _ in range(4):
        with pool.allocate(SLAB // 4, owner="store", deadline=0.0) as lease:
            holds.append(lease.hold(on_evict=told.append))
    for _ in range(2):
        with pool.allocate(SLAB // 4, owner="store", deadline=0.0) as lease:
            holds.append(lease.hold(on_evict=told.append))
    assert told == holds[:2]  # the oldest
    assert holds[0].lease("writer") is None
    pool.check()


def test_a_waiting_write_being_written_is_not_shed() -> None:
    pool = pool_of(1)
    told: list[Hold] = []
    with pool.allocate(SLAB, owner="store", deadline=0.0) as lease:
        hold = lease.hold(on_evict=told.append)
    writing = hold.lease("writer")
    assert writing is not None
    with pytest.raises(PoolFull):
        pool.allocate(SLAB, owner="store", deadline=0.0)
    assert told == []
    writing.release()
    pool.allocate(SLAB, owner="store", deadline=0.0).release()
    assert told == [hold]


def test_draining_a_slab_sheds_its_waiting_writes_and_keeps_warmer_ones(pool: MemoryPool, lru: Lru) -> None:
    told: list[Hold] = []
    holds = []
    for number in range(32):
        with pool.allocate(SLAB // 4, owner="store", deadline=0.0) as lease:
            resident = lru.admit(storage_key(f"f-{number}"), lease)
            waiting = lease.hold(on_evict=told.append)
            waiting.touch(resident.tick)
            holds.append(waiting)
    lru.store("new", SLAB)
    assert sorted(map(holds.index, told)) == [0, 1, 2, 3]
    pool.check()


def test_evicting_a_frame_frees_its_slot_though_a_write_waits_for_it(pool: MemoryPool, lru: Lru) -> None:
    told: list[Hold] = []
    holds = []
    for number in range(32):
        with pool.allocate(SLAB // 4, owner="store", deadline=0.0) as lease:
            lru.admit(storage_key(f"f-{number}"), lease)
            holds.append(lease.hold(on_evict=told.append))
    lru.store("new", SLAB // 4)
    assert told == [holds[0]]
    assert lru.num_evicted == 1


def test_a_raising_callback_leaves_the_pool_whole(pool: MemoryPool) -> None:
    def on_evict(hold: Hold) -> None:
        raise RuntimeError("bug")

    holds = []
    for _ in range(32):
        with pool.allocate(SLAB // 4, owner="store", deadline=0.0) as lease:
            holds.append(lease.hold(on_evict=on_evict))
    with pytest.raises(RuntimeError, match="bug"):
        pool.allocate(SLAB, owner="store", deadline=0.0)
    pool.check()
    assert pool.stats().leases == 0
    assert sum(hold.alive for hold in holds) == 28


def test_a_raising_reclaimer_leaves_the_pool_whole(pool: MemoryPool) -> None:
    class Broken(Lru):
        def evict(self, holds: Sequence[Hold]) -> int:
            if len(holds) > 1:
                raise RuntimeError("bug")
            return super().evict(holds)

    lru = Broken(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    with pytest.raises(RuntimeError, match="bug"):
        pool.allocate(SLAB, owner="store", deadline=0.0)
    pool.check()
    lru.store("same-class", SLAB // 4)


def test_a_second_reclaimer_is_refused(pool: MemoryPool, lru: Lru) -> None:
    pool.attach(lru)
    with pytest.raises(ConfigError, match="already"):
        Lru(pool)


def test_try_allocate_evicts_nothing(pool: MemoryPool, lru: Lru) -> None:
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    assert pool.try_allocate(SLAB // 4, owner="test") is None
    assert lru.num_asked == lru.num_evicted == 0
