"""What an allocation does while nothing can leave, and what several threads do that make room at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from lru import KIB, SLAB, Lru, pool_of

from lmcache_core.errors import PoolFull
from lmcache_core.identity.keys import storage_key
from lmcache_core.memory import Hold, Lease, MemoryPool


@pytest.fixture
def pool() -> MemoryPool:
    return pool_of(8)


@pytest.fixture
def lru(pool: MemoryPool) -> Lru:
    return Lru(pool)


@pytest.mark.parametrize("nbytes", [SLAB // 4, SLAB // 2, 2 * SLAB])
def test_a_refused_allocation_asks_a_few_times_and_waits_instead_of_spinning(
    pool: MemoryPool, lru: Lru, nbytes: int
) -> None:
    for number in range(31):
        lru.store(f"f-{number}", SLAB // 4)
    lru.pinned = set(lru.residents)
    started = time.monotonic()
    kept = pool.allocate(SLAB // 4, owner="x", deadline=0.0)
    with pytest.raises(PoolFull, match="in time"):
        pool.allocate(nbytes, owner="store", deadline=started + 0.2)
    assert time.monotonic() - started >= 0.2
    assert lru.num_asked <= 2
    kept.release()


def test_a_reclaimer_that_only_pretends_does_not_make_an_allocation_spin(pool: MemoryPool) -> None:
    class Liar(Lru):
        def evict_coldest(self, slot_nbytes: int) -> bool:
            self.num_evicted += 1
            return True

        def evict(self, holds: Sequence[Hold]) -> int:
            self.num_evicted += 1
            return len(holds)

    lru = Liar(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    for nbytes in (SLAB // 4, SLAB):
        with pytest.raises(PoolFull):
            pool.allocate(nbytes, owner="store", deadline=time.monotonic() + 0.1)
    assert lru.num_evicted < 100


def test_a_reclaimer_that_fails_to_evict_what_it_offers_does_not_make_an_allocation_spin() -> None:
    pool = pool_of(8)

    class Stuck(Lru):
        def evict_coldest(self, slot_nbytes: int) -> bool:
            self.num_evicted += 1
            return False

        def evict(self, holds: Sequence[Hold]) -> int:
            self.num_evicted += 1
            return 0

    lru = Stuck(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    with pytest.raises(PoolFull):
        pool.allocate(SLAB // 4, owner="store", deadline=time.monotonic() + 0.1)
    assert lru.num_evicted <= 2 * (1 + 32)  # each frame by name, now and at the deadline


def test_a_pin_that_expires_unannounced_is_noticed_at_the_deadline() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.02
        if now > 0.05:
            lru.pinned.clear()
        return now

    pool = pool_of(8, clock=clock)
    lru = Lru(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    for nbytes in (SLAB // 4, SLAB):
        now, lru.pinned = 0.0, set(lru.residents)
        pool.allocate(nbytes, owner="store", deadline=0.05).release()
        for number in range(5):
            lru.store(f"again-{nbytes}-{number}", SLAB // 4)


def test_a_slab_being_emptied_gives_its_room_to_who_empties_it(pool: MemoryPool) -> None:
    class Thief(Lru):
        stolen: Lease | None = None

        def evict(self, holds: Sequence[Hold]) -> int:
            self.stolen = self.pool.try_allocate(SLAB // 4, owner="thief")
            self.pool.check()
            return super().evict(holds)

    lru = Thief(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    lru._take(storage_key("f-3")).hold.drop()  # a free slot in what will be emptied
    pool.allocate(SLAB, owner="store", deadline=0.0).release()
    assert lru.stolen is None
    assert lru.num_evicted == 3
    pool.check()


def test_one_thread_empties_slabs_while_another_waits_for_that() -> None:
    pool = pool_of(2)

    class Slow(Lru):
        entered = threading.Event()
        leave = threading.Event()
        num_drains = 0

        def evict(self, holds: Sequence[Hold]) -> int:
            self.num_drains += 1
            self.entered.set()
            assert self.leave.wait(30)
            return super().evict(holds)

    lru = Slow(pool)
    for number in range(2):
        lru.store(f"f-{number}", SLAB)
    got: list[Lease] = []

    def allocate() -> None:
        got.append(pool.allocate(SLAB // 2, owner="store", deadline=time.monotonic() + 30))

    first, second = threading.Thread(target=allocate), threading.Thread(target=allocate)
    first.start()
    assert lru.entered.wait(30)
    asked = threading.Event()
    lru.on_ask = asked.set
    second.start()
    assert asked.wait(30)
    lru.leave.set()
    for thread in (first, second):
        thread.join(30)
    assert (lru.num_drains, lru.num_evicted, len(got)) == (1, 1, 2)
    for lease in got:
        lease.release()


def test_adjacent_slabs_are_as_cold_as_the_warmest_of_them(pool: MemoryPool, lru: Lru) -> None:
    for number in range(8):
        lru.store(f"f-{number}", SLAB)
    for number in (0, 2, 3, 6, 7):
        lru.read(f"f-{number}")
    lru.store("new", 2 * SLAB)  # 1, 4 and 5 are coldest, but only 4 and 5 lie together
    assert [n for n in range(8) if storage_key(f"f-{n}") not in lru.residents] == [4, 5]


def test_a_frame_that_nobody_touched_yet_counts_as_new(pool: MemoryPool, lru: Lru) -> None:
    for number in range(28):
        lru.store(f"f-{number}", SLAB // 4)
    untouched = []
    for _ in range(4):
        with pool.allocate(SLAB // 4, owner="store", deadline=0.0) as lease:
            untouched.append(lease.hold(on_evict=lambda hold: None))
    lru.store("new", SLAB)
    assert all(hold.alive for hold in untouched)
    assert [n for n in range(28) if storage_key(f"f-{n}") not in lru.residents] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["drop", "unpin"])
def test_a_slab_that_could_not_be_emptied_is_tried_again_when_that_changed(how: str) -> None:
    pool = pool_of(8)
    lru = Lru(pool)
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    lru.pinned = {storage_key(f"f-{number}") for number in range(0, 32, 4)}
    refused = threading.Event()
    whole, lru_evict = 0, lru.evict

    def evict(holds: Sequence[Hold]) -> int:
        nonlocal whole
        whole += 1
        if whole == 8:
            refused.set()
        return lru_evict(holds)

    lru.evict = evict  # type: ignore[method-assign]
    got: list[Lease] = []
    thread = threading.Thread(
        target=lambda: got.append(pool.allocate(SLAB, owner="waiter", deadline=float("inf")))
    )
    thread.start()
    assert refused.wait(30)
    key = storage_key("f-4")
    if how == "drop":
        lru._take(key).hold.drop()
    else:
        lru.pinned.discard(key)
        pool.wake()
    thread.join(30)
    assert not thread.is_alive()
    got[0].release()
    assert len(lru.residents) == 28


@pytest.mark.parametrize("how", ["release", "drop", "unpin", "close"])
def test_a_waiting_allocation_is_woken_by_whatever_makes_room(how: str) -> None:
    for _ in range(20):
        pool = pool_of(1)
        lru = Lru(pool)
        lease = pool.allocate(SLAB // 2, owner="test", deadline=0.0)
        key = lru.store("pinned", SLAB // 2)
        lru.pinned.add(key)
        waiting = threading.Event()
        lru.on_ask = waiting.set
        outcome: list[Lease | PoolFull] = []

        def allocate(pool: MemoryPool = pool, outcome: list[Lease | PoolFull] = outcome) -> None:
            try:
                outcome.append(pool.allocate(SLAB // 2, owner="waiter", deadline=float("inf")))
            except PoolFull as error:
                outcome.append(error)

        thread = threading.Thread(target=allocate)
        thread.start()
        assert waiting.wait(30)
        if how == "release":
            lease.release()
        elif how == "drop":
            lru.residents.pop(key).hold.drop()
        elif how == "unpin":
            lru.pinned.clear()
            pool.wake()
        else:
            pool.close()
        thread.join(30)
        (got,) = outcome
        assert isinstance(got, PoolFull) == (how == "close")
        if isinstance(got, Lease):
            got.release()
        if not lease.released:
            lease.release()
        pool.check()


def test_leases_that_come_and_go_do_not_hide_memory_from_a_waiting_allocation(
    pool: MemoryPool, lru: Lru
) -> None:
    """A slab that could not be emptied is tried again once its lease is gone."""
    for number in range(32):
        lru.store(f"f-{number}", SLAB // 4)
    leases = [lru.residents[storage_key(f"f-{number}")].hold.lease("load") for number in range(0, 32, 4)]
    got: list[Lease] = []
    waiting = threading.Event()
    lru.on_ask = waiting.set
    thread = threading.Thread(
        target=lambda: got.append(pool.allocate(SLAB, owner="waiter", deadline=float("inf")))
    )
    thread.start()
    assert waiting.wait(30)
    for lease in leases[:1]:
        assert lease is not None
        lease.release()
    thread.join(30)
    assert not thread.is_alive()
    got[0].release()
    for lease in leases[1:]:
        assert lease is not None
        lease.release()
    pool.check()


def test_threads_that_make_room_at_once_evict_no_more_than_they_need() -> None:
    pool = pool_of(16)
    lru = Lru(pool)
    for number in range(64):
        lru.store(f"old-{number}", SLAB // 4)
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            barrier.wait()
            for number in range(8):
                lru.store(f"new-{thread}-{number}", SLAB // 2, deadline=time.monotonic() + 30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    pool.check()
    assert lru.num_evicted <= 64 + 8  # 32 frames of two old ones each


def test_threads_storing_and_reading_two_models_never_see_each_others_bytes() -> None:
    pool = pool_of(16)
    lru = Lru(pool)
    barrier = threading.Barrier(6)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        nbytes = (SLAB // 4, 24 * KIB, SLAB + 4 * KIB)[thread % 3]
        try:
            barrier.wait()
            for number in range(150):
                name = f"t{thread}-{number}"
                key = storage_key(name)
                with pool.allocate(nbytes, owner=name, deadline=time.monotonic() + 30) as lease:
                    lease.memory[: len(name)] = name.encode()
                    lease.memory[-len(name) :] = name.encode()
                    with lease.share("second") as second:
                        lru.admit(key, second)
                    assert (
                        bytes(lease.memory[: len(name)]) == bytes(lease.memory[-len(name) :]) == name.encode()
                    )
                for back in range(0, 20, 3):
                    other = f"t{(thread + back) % 6}-{max(number - back, 0)}"
                    assert lru.read(other) in (None, other.encode())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    pool.check()
    stats = pool.stats()
    assert (stats.leases, stats.leased_bytes, stats.lost_leases) == (0, 0, 0)


def test_a_pool_of_many_frames_still_allocates_without_scanning_them() -> None:
    """Counted, not timed: what one allocation in a full pool asks of the frames it doesn't touch."""
    pool = MemoryPool(24_000 * 4 * KIB, slab_nbytes=256 * KIB, huge_pages=False)
    ticks_read = 0

    class Counted(Lru):
        def coldest(self, slot_nbytes: int) -> int | None:
            nonlocal ticks_read
            ticks_read += 1
            return super().coldest(slot_nbytes)

    lru = Counted(pool)
    holds = []
    for number in range(24_000):
        with pool.allocate(4 * KIB, owner="store", deadline=0.0) as lease:
            holds.append(lru.admit(storage_key(f"f-{number}"), lease))
    for number in range(100):
        lru.store(f"g-{number}", 4 * KIB)
    assert ticks_read == lru.num_evicted == 100
