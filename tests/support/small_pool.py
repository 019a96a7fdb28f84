"""Leases of a small pool: frames of one size, and calls that race for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmcache_core.errors import LeaseError
from lmcache_core.memory import Lease, MemoryPool

FRAME = 16 * 1024


def small_pool() -> MemoryPool:
    """Room for 16 frames in four slabs."""
    return MemoryPool(16 * FRAME, slab_nbytes=4 * FRAME)


def allocate(pool: MemoryPool, nbytes: int = FRAME, owner: str = "test") -> Lease:
    lease = pool.try_allocate(nbytes, owner=owner)
    assert lease is not None
    return lease


def used(pool: MemoryPool) -> int:
    pool.check()
    return pool.stats().used_bytes


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Runs each call on a thread of its own, all at the same moment; returns results and errors."""
    barrier = threading.Barrier(len(calls))
    outcomes: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        barrier.wait()
        try:
            outcomes[index] = calls[index]()
        except LeaseError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
