"""Leases: counting, misuse, loss, and memory that somebody still looks at."""

from __future__ import annotations

import gc
import logging
import pickle
import subprocess
import sys
import threading

import pytest
from small_pool import FRAME, allocate, at_once, small_pool, used

from lmcache_core.errors import LeaseError, PoolFull
from lmcache_core.events import Event, EventBus, LeaseLost
from lmcache_core.identity.keys import storage_key
from lmcache_core.memory import Lease, MemoryPool


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def pool() -> MemoryPool:
    return small_pool()


def test_memory_stays_in_use_until_the_last_lease_is_released(pool: MemoryPool) -> None:
    first = allocate(pool)
    second = first.share("other")
    assert second.owner == "other"
    assert second.address == first.address
    first.release()
    assert used(pool) == FRAME
    second.release()
    assert used(pool) == 0


def test_a_second_release_raises_and_frees_nothing(pool: MemoryPool) -> None:
    lease = allocate(pool, owner="store")
    other = lease.share("other")
    lease.release()
    with pytest.raises(LeaseError, match="store was released twice"):
        lease.release()
    assert pool.stats().leases == 1
    other.release()
    assert used(pool) == 0


def test_of_two_threads_that_release_one_lease_exactly_one_raises(pool: MemoryPool) -> None:
    for _ in range(200):
        lease = allocate(pool)
        outcomes = at_once(lease.release, lease.release)
        assert sum(isinstance(outcome, LeaseError) for outcome in outcomes) == 1
    assert used(pool) == 0


@pytest.mark.parametrize("use", ["share", "hold", "memory"])
def test_use_after_release_raises(pool: MemoryPool, use: str) -> None:
    lease = allocate(pool)
    lease.release()
    with pytest.raises(LeaseError, match="after its release"):
        {"share": lambda: lease.share("x"), "hold": lease.hold, "memory": lambda: lease.memory}[use]()


def test_leaving_the_context_releases_once_even_after_an_early_release(pool: MemoryPool) -> None:
    with allocate(pool):
        pass
    with allocate(pool) as lease:
        lease.release()
    with pytest.raises(ZeroDivisionError), allocate(pool):
        raise ZeroDivisionError
    assert used(pool) == 0


def test_lease_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(LeaseError("a lease was released twice")))
    assert isinstance(error, LeaseError)


def test_a_lost_lease_is_counted_and_its_memory_comes_back(
    pool: MemoryPool, caplog: pytest.LogCaptureFixture
) -> None:
    lease = allocate(pool, owner="forgetful")
    del lease
    gc.collect()
    with caplog.at_level(logging.WARNING):
        stats = pool.stats()
    assert (stats.lost_leases, stats.leases, stats.used_bytes) == (1, 0, 0)
    assert "forgetful was dropped without release" in caplog.text


@pytest.mark.parametrize("debug", [False, True])
def test_a_lost_lease_is_an_event_with_its_origin_in_debug(debug: bool) -> None:
    bus, recorder = EventBus(), Recorder()
    bus.subscribe(recorder)
    pool = MemoryPool(16 * FRAME, events=bus, debug=debug)
    allocate(pool, owner="forgetful")
    gc.collect()
    assert recorder.events == []  # never from a finalizer
    allocate(pool).release()
    (event,) = recorder.events
    assert isinstance(event, LeaseLost)
    assert (event.owner, event.nbytes) == ("forgetful", FRAME)
    assert ("test_a_lost_lease_is_an_event" in event.origin) is debug


def test_a_lease_lost_in_a_reference_cycle_comes_back(pool: MemoryPool) -> None:
    cycle: list[object] = [allocate(pool)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.stats().lost_leases == 1
    assert used(pool) == 0


def test_a_view_kept_beyond_its_lease_is_invalid(pool: MemoryPool) -> None:
    lease = allocate(pool)
    memory = lease.memory
    lease.release()
    assert used(pool) == 0
    with pytest.raises(ValueError, match="released memoryview"):
        memory[0]


def test_memory_is_not_reused_while_a_slice_of_it_lives(pool: MemoryPool) -> None:
    lease = allocate(pool)
    lease.memory[0] = 42
    part = lease.memory[:10]
    offset = lease.offset
    lease.release()
    stats = pool.stats()
    assert (stats.leases, stats.quarantined_bytes, stats.leased_bytes) == (0, FRAME, FRAME)
    others = [allocate(pool) for _ in range(15)]
    assert offset not in [other.offset for other in others]
    assert pool.try_allocate(FRAME, owner="test") is None
    assert part[0] == 42
    part.release()
    assert pool.stats().quarantined_bytes == 0
    again = allocate(pool)
    assert again.offset == offset
    for other in (*others, again):
        other.release()
    assert used(pool) == 0


def test_memory_is_not_reused_while_an_array_over_it_lives(pool: MemoryPool) -> None:
    numpy = pytest.importorskip("numpy")
    lease = allocate(pool)
    array = numpy.frombuffer(lease.memory, dtype=numpy.int32)
    lease.release()
    array[:] = 7
    assert used(pool) == FRAME
    del array
    assert used(pool) == 0


def test_the_quarantine_of_one_lease_leaves_others_on_the_same_bytes_alone(pool: MemoryPool) -> None:
    lease = allocate(pool)
    other = lease.share("other")
    part = lease.memory[:1]
    lease.release()
    other.memory[0] = 9
    other.release()
    assert used(pool) == FRAME
    assert part[0] == 9
    del part
    assert used(pool) == 0


def test_a_view_of_a_lost_lease_stays_valid_and_keeps_the_memory(pool: MemoryPool) -> None:
    memory = allocate(pool).memory
    gc.collect()
    memory[0] = 1
    stats = pool.stats()
    assert (stats.lost_leases, stats.quarantined_bytes) == (1, FRAME)
    del memory
    assert used(pool) == 0


def test_an_allocation_waits_for_the_last_view_and_no_longer() -> None:
    waiting = threading.Event()

    def clock() -> float:
        waiting.set()
        return 0.0

    pool = MemoryPool(16 * FRAME, slab_nbytes=4 * FRAME, clock=clock)
    leases = [allocate(pool) for _ in range(16)]
    part = leases[0].memory[:1]
    leases[0].release()
    got: list[Lease] = []
    thread = threading.Thread(
        target=lambda: got.append(pool.allocate(FRAME, owner="waiter", deadline=float("inf")))
    )
    thread.start()
    assert waiting.wait(30)
    assert got == []
    part.release()
    thread.join(30)
    assert not thread.is_alive()
    for lease in (*leases[1:], *got):
        lease.release()
    assert used(pool) == 0


def test_giving_back_never_waits_for_the_pools_lock(pool: MemoryPool) -> None:
    """A garbage collection may run a finalizer that releases inside a critical section of its thread."""
    lease, lost = allocate(pool), allocate(pool)
    viewed = allocate(pool)
    part = viewed.memory[:1]
    viewed.release()
    with allocate(pool) as kept:
        dropped, forgotten = kept.hold(), kept.hold()
    with pool._ledger.lock:
        lease.release()
        dropped.drop()
        del lost, forgotten
        part.release()
        assert not dropped.alive
    assert used(pool) == 0


def test_leases_survive_the_close_of_the_pool(pool: MemoryPool) -> None:
    lease = allocate(pool)
    lease.memory[:5] = b"alive"
    pool.close()
    pool.close()
    assert bytes(lease.memory[:5]) == b"alive"
    with pytest.raises(PoolFull, match="closed"):
        pool.allocate(FRAME, owner="late", deadline=float("inf"))
    assert pool.try_allocate(FRAME, owner="late") is None
    lease.release()
    assert used(pool) == 0


def test_repr_names_owner_and_state_and_no_address(pool: MemoryPool) -> None:
    lease = allocate(pool, owner="store")
    hold = lease.hold(storage_key("c-1"))
    assert repr(lease) == f"Lease(owner='store', nbytes={FRAME}, offset=0)"
    assert repr(hold) == f"Hold(tag='c-1', nbytes={FRAME}, resident)"
    lease.release()
    hold.drop()
    assert "released" in repr(lease)
    assert "dropped" in repr(hold)


def test_unreleased_leases_holds_and_views_do_not_disturb_the_interpreters_exit() -> None:
    program = """
import threading
from lmcache_core.memory import MemoryPool
pool = MemoryPool(1 << 20, debug=True)
leases = [pool.try_allocate(5000, owner="exit") for _ in range(20)]
holds = [lease.hold() for lease in leases] + [leases[0].hold(on_evict=print)]
views = [lease.memory[:10] for lease in leases]
leases[1].release()
cycle = [leases, holds, views]; cycle.append(cycle)
class Late:
    def __init__(self, lease): self.lease = lease
    def __del__(self):
        if not self.lease.released: self.lease.release()
late = Late(leases[2])
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
