"""Making room: what leaves, what stays, and what an allocation does when nothing can leave."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from lmcache_core.errors import ConfigError, PoolFull
from lmcache_core.identity.keys import StorageKey, storage_key
from lmcache_core.memory import Hold, Lease, MemoryPool

KIB = 1024
SLAB = 64 * KIB


@dataclass
class Resident:
    hold: Hold
    parent: StorageKey | None
    tick: int
    children: set[StorageKey] = field(default_factory=set)


class Lru:
    """A reclaimer as a memory tier is one: least recently used first, children before parents."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.residents: OrderedDict[StorageKey, Resident] = OrderedDict()
        self.pinned: set[StorageKey] = set()
        self.tick = 0
        self.num_asked = 0
        self.num_evicted = 0
        self.on_ask: Callable[[], None] = lambda: None
        pool.attach(self)

    def coldest(self, slot_nbytes: int) -> int | None:
        self.num_asked += 1
        self.on_ask()
        with self.lock:
            key = self._candidate(slot_nbytes)
            return None if key is None else self.residents[key].tick

    def evict_coldest(self, slot_nbytes: int) -> bool:
        with self.lock:
            key = self._candidate(slot_nbytes)
            hold = self.residents[key].hold if key is not None else None
        return hold is not None and self.evict([hold]) > 0

    def evict(self, holds: Sequence[Hold]) -> int:
        with self.lock:
            family = self._family([hold.tag for hold in holds if hold.tag in self.residents])
            if any(self._stays(key) for key in family):
                return 0
            taken = [self._take(key) for key in reversed(family)]
        self.num_evicted += len(taken)
        return sum(resident.hold.evict() for resident in taken)

    def store(self, name: str, nbytes: int, parent: str | None = None, deadline: float = 0.0) -> StorageKey:
        key = storage_key(name)
        with self.pool.allocate(nbytes, owner="store", deadline=deadline) as lease:
            lease.memory[:] = name.encode().ljust(nbytes, b".")[:nbytes]
            self.admit(key, lease, parent)
        return key

    def admit(self, key: StorageKey, lease: Lease, parent: str | None = None) -> Hold:
        hold = lease.hold(key)
        with self.lock:
            above = storage_key(parent) if parent is not None else None
            if above is not None and above in self.residents:
                self.residents[above].children.add(key)
            self.residents[key] = Resident(hold, above, 0)
            self._use(key)
        return hold

    def read(self, name: str) -> bytes | None:
        key = storage_key(name)
        with self.lock:
            resident = self.residents.get(key)
            if resident is not None:
                self._use(key)
        lease = resident.hold.lease("reader") if resident is not None else None
        if lease is None:
            return None
        with lease:
            return bytes(lease.memory[: len(name)])

    def _use(self, key: StorageKey) -> None:
        self.tick += 1
        self.residents[key].tick = self.tick
        self.residents[key].hold.touch(self.tick)
        self.residents.move_to_end(key)

    def _stays(self, key: StorageKey) -> bool:
        return key in self.pinned or self.residents[key].hold.leased

    def _candidate(self, slot_nbytes: int) -> StorageKey | None:
        for key, resident in self.residents.items():
            if resident.hold.slot_nbytes == slot_nbytes and not any(map(self._stays, self._family([key]))):
                return key
        return None

    def _family(self, keys: list[StorageKey]) -> list[StorageKey]:
        """With all that depends on them, parents first."""
        family = list(dict.fromkeys(keys))
        for key in family:  # grows while it is walked
            family += [child for child in self.residents[key].children if child not in family]
        return family

    def _take(self, key: StorageKey) -> Resident:
        resident = self.residents.pop(key)
        if resident.parent is not None and resident.parent in self.residents:
            self.residents[resident.parent].children.discard(key)
        return resident


def pool_of(num_slabs: int, **options: object) -> MemoryPool:
    return MemoryPool(num_slabs * SLAB, slab_nbytes=SLAB, **options)


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
