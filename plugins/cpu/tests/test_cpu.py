"""The cpu backend: references to the pool's own memory, and what is left when the pool takes it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from lmcache_core.sdk import (
    BackendClosed,
    DeadlineExceeded,
    Item,
    Lease,
    MemoryPool,
    Outcome,
    Resident,
    Status,
    StorageKey,
    View,
)
from lmcache_core_cpu.backend import CpuBackend
from lmcache_core_cpu.config import CpuConfig

PAGE = 4096
FRAME = 16 * PAGE
A, B, C = StorageKey("a"), StorageKey("b"), StorageKey("c")


@dataclass
class Host:
    pool: MemoryPool
    capacity_bytes: int | None = 8 * FRAME
    tier: str = "cpu"
    deadline_s: float = 1.0
    max_in_flight: int = 4
    parts: tuple[str, ...] = ()

    def lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        raise AssertionError(reason)

    def lost_all(self, reason: str) -> None:
        raise AssertionError(reason)


@dataclass
class Call:
    deadline: float = field(default_factory=lambda: time.monotonic() + 60)
    cancelled: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def remaining(self) -> float:
        if self.cancelled:
            raise DeadlineExceeded("cancelled")
        return self.deadline - time.monotonic()

    def done(self, index: int, outcome: Outcome) -> None:
        assert index not in self.outcomes
        self.outcomes[index] = outcome


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    pool = MemoryPool(64 * FRAME, huge_pages=False)
    yield pool
    pool.check()
    assert pool.stats().leases == 0
    pool.close()


@pytest.fixture
def cpu(pool: MemoryPool) -> Iterator[CpuBackend]:
    backend = CpuBackend(CpuConfig())
    backend.open(Host(pool))
    yield backend
    backend.close()
    assert pool.stats().holds == 0


def frame(pool: MemoryPool, fill: int, nbytes: int = FRAME) -> Lease:
    lease = pool.try_allocate(nbytes, owner="test")
    assert lease is not None
    lease.memory[:] = bytes([fill]) * nbytes
    return lease


def adopt(cpu: CpuBackend, pool: MemoryPool, key: StorageKey, fill: int) -> Outcome:
    with frame(pool, fill) as lease:
        hold = lease.hold(tag=key)
        outcome = cpu.adopt(key, hold)
        if outcome.status is not Status.OK:
            hold.drop()
        return outcome


def view(lease: Lease) -> View:
    return View(lease.address, lease.nbytes, lease.memory)


def test_it_is_a_resident_backend(cpu: CpuBackend) -> None:
    assert isinstance(cpu, Resident)
    assert cpu.capabilities.medium == "memory"


def test_what_is_borrowed_is_the_memory_that_was_adopted(cpu: CpuBackend, pool: MemoryPool) -> None:
    with frame(pool, 7) as lease:
        outcome = cpu.adopt(A, lease.hold(tag=A))
        address = lease.address
    assert (outcome.status, outcome.nbytes) == (Status.OK, FRAME)
    with cpu.borrow(A) as borrowed:  # type: ignore[union-attr]
        assert borrowed.address == address
        assert borrowed.memory[0] == 7
    assert cpu.borrow(B) is None


def test_adopting_a_key_again_drops_the_older_frame(cpu: CpuBackend, pool: MemoryPool) -> None:
    first, second = adopt(cpu, pool, A, 1), adopt(cpu, pool, A, 2)
    assert first.token is not None
    assert second.token is not None
    assert first.token < second.token
    assert pool.stats().holds == 1
    with cpu.borrow(A) as borrowed:  # type: ignore[union-attr]
        assert borrowed.memory[0] == 2


def test_a_frame_that_the_pool_took_back_is_a_miss_and_forgotten(cpu: CpuBackend, pool: MemoryPool) -> None:
    with frame(pool, 1) as lease:
        hold = lease.hold(tag=A)
        cpu.adopt(A, hold)
    hold.drop()  # what the pool's eviction does
    assert cpu.borrow(A) is None
    assert cpu.stats().entries == 0
    assert cpu.stats().used_bytes == 0


def test_discard_drops_exactly_the_hold_it_is_given(cpu: CpuBackend, pool: MemoryPool) -> None:
    with frame(pool, 1) as lease:
        first = lease.hold(tag=A)
    cpu.adopt(A, first)
    adopt(cpu, pool, A, 2)
    assert cpu.discard(A, first) is False
    with cpu.borrow(A) as borrowed:  # type: ignore[union-attr]
        assert borrowed.memory[0] == 2
    with frame(pool, 3) as lease:
        second = lease.hold(tag=A)
    cpu.adopt(A, second)
    assert cpu.discard(A, second) is True
    assert cpu.borrow(A) is None
    assert pool.stats().holds == 0


def test_the_capacity_is_kept_and_dead_frames_make_room(cpu: CpuBackend, pool: MemoryPool) -> None:
    holds = []
    for number in range(8):
        with frame(pool, number) as lease:
            holds.append(lease.hold())
        assert cpu.adopt(StorageKey(f"k-{number}"), holds[-1]).status is Status.OK
    assert adopt(cpu, pool, A, 9).status is Status.FULL
    assert adopt(cpu, pool, StorageKey("k-3"), 9).status is Status.OK, "replacing needs no more"
    assert cpu.stats().used_bytes == 8 * FRAME
    holds[0].drop()
    assert adopt(cpu, pool, A, 9).status is Status.OK


def test_put_and_get_copy_like_any_other_backend(cpu: CpuBackend, pool: MemoryPool) -> None:
    with frame(pool, 5) as source, frame(pool, 0) as target:
        half = view(target).slice(0, FRAME // 2)
        rest = view(target).slice(FRAME // 2, FRAME // 2)
        call = Call()
        cpu.put_many([Item(A, [view(source)], parent=B)], call)
        assert call.outcomes[0].status is Status.OK
        source.memory[:] = bytes(FRAME)
        call = Call()
        cpu.get_many(
            [
                Item(A, [half, rest]),
                Item(A, [half]),
                Item(A, [half.slice(0, PAGE)], offset=PAGE, whole=False),
                Item(A, [half.slice(0, 2 * PAGE)], offset=FRAME - PAGE, whole=False),
                Item(B, [half]),
            ],
            call,
        )
        assert [call.outcomes[i].status for i in range(5)] == [
            Status.OK,
            Status.TOO_SMALL,
            Status.OK,
            Status.MISS,
            Status.MISS,
        ]
        assert call.outcomes[1].nbytes == FRAME
        assert bytes(target.memory) == bytes([5]) * FRAME


def test_scan_and_stat_and_delete(cpu: CpuBackend, pool: MemoryPool) -> None:
    with frame(pool, 1) as source:
        cpu.put_many([Item(key, [view(source)], parent=A) for key in (B, C)], Call())
    adopt(cpu, pool, A, 1)
    first = cpu.scan(Call(), "", None, 2)
    second = cpu.scan(Call(), "", first.cursor, 2)
    assert [(e.key, e.parent) for e in (*first.entries, *second.entries)] == [(B, A), (C, A), (A, None)]
    assert second.cursor is None
    call = Call()
    cpu.delete_many([B, B], call)
    assert [call.outcomes[i].status for i in (0, 1)] == [Status.OK, Status.MISS]
    call = Call()
    cpu.stat_many([A, B], call)
    assert [call.outcomes[i].status for i in (0, 1)] == [Status.OK, Status.MISS]
    assert call.outcomes[0].nbytes == FRAME


def test_a_put_that_finds_no_memory_is_full(cpu: CpuBackend, pool: MemoryPool) -> None:
    taken = []
    while (lease := pool.try_allocate(FRAME, owner="test")) is not None:
        taken.append(lease)
    call = Call()
    cpu.put_many([Item(A, [view(taken[0])])], call)
    assert call.outcomes[0].status is Status.FULL
    for lease in taken:
        lease.release()


def test_after_close_nothing_is_kept_and_nothing_is_taken(cpu: CpuBackend, pool: MemoryPool) -> None:
    adopt(cpu, pool, A, 1)
    with cpu.borrow(A) as borrowed:  # type: ignore[union-attr]
        cpu.close()
        assert borrowed.memory[0] == 1, "a lease outlives the tier"
    assert pool.stats().holds == 0
    outcome = adopt(cpu, pool, A, 1)
    assert outcome.status is Status.FAILED
    assert isinstance(outcome.error, BackendClosed)
    assert cpu.borrow(A) is None


def test_concurrent_adopts_never_exceed_the_capacity(cpu: CpuBackend, pool: MemoryPool) -> None:
    start = threading.Barrier(4)
    kept: list[int] = []

    def work(thread: int) -> None:
        start.wait()
        statuses = [adopt(cpu, pool, StorageKey(f"{thread}-{n}"), n).status for n in range(6)]
        kept.append(statuses.count(Status.OK))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(kept) == 8
    assert cpu.stats().used_bytes == 8 * FRAME
