"""The frame memory of a process: one mapping, allocation with a deadline, and its numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_core.errors import ConfigError, PoolFull
from lmcache_core.events import EventBus
from lmcache_core.memory.lease import Lease
from lmcache_core.memory.ledger import Claim, Ledger
from lmcache_core.memory.mapping import HUGE_PAGE, Mapping
from lmcache_core.memory.reclaim import Reclaim, Reclaimer
from lmcache_core.memory.slab_table import PAGE, SlabTable

log = logging.getLogger(__name__)

_GRAINS = 128
_MAX_GRAIN_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One moment's numbers. Bytes are of whole slots, so `used_bytes` <= `capacity_bytes`."""

    capacity_bytes: int
    reserved_bytes: int
    used_bytes: int
    """In slots that are leased or held."""
    leased_bytes: int
    """In slots with a lease, quarantined ones included: what eviction can't free."""
    held_bytes: int
    """In slots with a hold, leased or not."""
    quarantined_bytes: int
    """In slots whose lease ended while views of the bytes live on, once for each such lease."""
    leases: int
    holds: int
    lost_leases: int
    """Leases garbage-collected without release since the start."""
    slabs: int
    drained_slabs: int
    """Slabs emptied for another class since the start."""
    refused: int
    """Allocations that ended in `PoolFull` since the start."""


class MemoryPool:
    """Memory for frames, all in one mapping that backends may register. Thread-safe.

    A slot is reused once nothing leases, holds or views it. When none is free, `allocate` evicts what
    is coldest: a frame of the same size class, or all frames of another class's slab. It is refused
    at its deadline at the latest, and immediately where waiting can't help.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        reserved_bytes: int = 0,
        slab_nbytes: int | None = None,
        huge_pages: bool = True,
        clock: Callable[[], float] = time.monotonic,
        events: EventBus | None = None,
        debug: bool = False,
    ) -> None:
        """Maps `capacity_bytes`, rounded down to whole pages of 4096.

        Leases may not take the last `reserved_bytes` unless allocated with `reserve`; what is merely
        held doesn't count, since a load can evict it. `slab_nbytes` is the grain that slabs are made
        of; a multiple of the usual frame's size wastes least. `debug` records where leases are taken.

        Raises:
            ConfigError: sizes that can't work, or memory that the system doesn't give.
        """
        capacity_bytes = capacity_bytes // PAGE * PAGE
        grain_nbytes = _default_grain(capacity_bytes) if slab_nbytes is None else slab_nbytes
        if capacity_bytes <= 0:
            raise ConfigError(f"a memory pool needs at least {PAGE} bytes")
        if grain_nbytes <= 0 or grain_nbytes % PAGE:
            raise ConfigError(f"slab_nbytes must be a positive multiple of {PAGE}, not {grain_nbytes}")
        if not 0 <= reserved_bytes < capacity_bytes:
            raise ConfigError(f"reserved_bytes must be in [0, {capacity_bytes}), not {reserved_bytes}")
        self._clock = clock
        self._events = events
        self._reclaimer: Reclaimer | None = None
        self._mapping = Mapping(capacity_bytes, huge_pages=huge_pages)
        table = SlabTable(capacity_bytes, min(grain_nbytes, capacity_bytes))
        self._ledger = Ledger(table, self._mapping, reserved_bytes=reserved_bytes, debug=debug)
        self._num_refused = 0  # guarded by the ledger's lock
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = reserved_bytes

    def attach(self, reclaimer: Reclaimer) -> None:
        """Names who decides which residents leave.

        Raises:
            ConfigError: another one is attached.
        """
        if self._reclaimer is not None and self._reclaimer is not reclaimer:
            raise ConfigError("this memory pool already has a reclaimer")
        self._reclaimer = reclaimer

    def try_allocate(self, nbytes: int, *, owner: str, reserve: bool = False) -> Lease | None:
        """A lease on `nbytes` of free memory with unspecified contents, or None. Evicts nothing."""
        if nbytes <= 0:
            raise ValueError(f"can't allocate {nbytes} bytes")
        self._report_lost()
        ledger = self._ledger
        claim: Claim = []
        try:
            with ledger.lock:
                ledger.settle()
                ledger.take(ledger.slot_nbytes(nbytes, reserve), reserve, claim)
            if ledger.notes:
                ledger.collect()
            return Lease(ledger, claim, nbytes, owner) if claim else None
        except BaseException:
            ledger.disclaim(claim)
            raise

    def allocate(self, nbytes: int, *, owner: str, deadline: float, reserve: bool = False) -> Lease:
        """A lease on `nbytes` with unspecified contents; evicts for it, and waits until `deadline`.

        `deadline` is by the pool's clock; one in the past evicts but doesn't wait. Waiting ends with
        any release, drop or `wake`. Runs the reclaimer and `on_evict` on this thread: call it without
        a lock that they take.

        Raises:
            PoolFull: nothing came free in time; or at once when it never can: larger than the pool
                (without `reserve`, than its unreserved part), or the pool is closed.
        """
        lease = self.try_allocate(nbytes, owner=owner, reserve=reserve)
        if lease is not None:
            return lease
        self._refuse_impossible(nbytes, reserve)
        claim: Claim = []
        try:
            if self._make_room(nbytes, deadline, reserve, claim):
                return Lease(self._ledger, claim, nbytes, owner)
        except BaseException:
            self._ledger.disclaim(claim)
            raise
        raise self._refusal(nbytes, reserve)

    def wake(self) -> None:
        """Says that residents may have become evictable without a release: unpinned, or childless."""
        with self._ledger.collecting, self._ledger.lock:
            self._ledger.settle()
            self._ledger.wake_all()

    @property
    def buffer(self) -> memoryview:
        """The whole memory, writable: to register it. A slot's bytes are only the lease holder's."""
        return self._mapping.view()

    @property
    def base_address(self) -> int:
        """Of the first byte: a multiple of 2 MiB."""
        return self._mapping.address

    def stats(self) -> PoolStats:
        self._report_lost()
        ledger = self._ledger
        with ledger.collecting, ledger.lock:
            ledger.settle()
            return PoolStats(
                capacity_bytes=self.capacity_bytes,
                reserved_bytes=self.reserved_bytes,
                used_bytes=ledger.table.used_bytes,
                leased_bytes=ledger.leased_bytes,
                held_bytes=ledger.held_bytes,
                quarantined_bytes=sum(claim[0].nbytes for _, claim in ledger.quarantined.values()),
                leases=ledger.num_leases,
                holds=ledger.num_holds,
                lost_leases=ledger.num_lost,
                slabs=ledger.table.num_slabs,
                drained_slabs=ledger.num_drained_slabs,
                refused=self._num_refused,
            )

    def check(self) -> None:
        """Asserts the invariants of the whole pool. Slow: for tests."""
        with self._ledger.collecting, self._ledger.lock:
            self._ledger.settle()
            self._ledger.check()

    def close(self) -> None:
        """Refuses allocations from now on and wakes those that wait. Idempotent.

        Leases and holds stay good: the memory goes back to the system now if nothing refers to it,
        else when the last of them and their views are gone.
        """
        self._report_lost()
        ledger = self._ledger
        with ledger.collecting, ledger.lock:
            ledger.settle()
            ledger.closed = True
            ledger.wake_all()
            unused = not ledger.table.used_bytes
        if unused:
            self._mapping.close()

    def _make_room(self, nbytes: int, deadline: float, reserve: bool, claim: Claim) -> bool:
        ledger = self._ledger
        reclaim = Reclaim(ledger, self._reclaimer, nbytes, claim, reserve=reserve)
        late = self._clock() >= deadline
        while True:
            if reclaim.step(expired=lambda: self._clock() >= deadline):
                return True
            if ledger.closed:
                return False
            remaining_s = deadline - self._clock()
            if remaining_s > 0:
                ledger.wait(reclaim.seen, remaining_s, for_drain=reclaim.saw_drain)
            elif late:
                return False
            else:
                late = True
                reclaim.restart()

    def _refuse_impossible(self, nbytes: int, reserve: bool) -> None:
        unreserved_bytes = self.capacity_bytes - (0 if reserve else self.reserved_bytes)
        if -(-nbytes // PAGE) * PAGE <= unreserved_bytes and not self._ledger.closed:
            return
        self._count_refusal()
        if self._ledger.closed:
            raise PoolFull("the memory pool is closed")
        apart = ", without the part reserved for loads" if unreserved_bytes < self.capacity_bytes else ""
        raise PoolFull(
            f"a frame of {nbytes} bytes can't fit the memory pool of {unreserved_bytes} bytes{apart}: "
            f"give it more memory or use smaller chunks"
        )

    def _refusal(self, nbytes: int, reserve: bool) -> PoolFull:
        self._count_refusal()
        stats = self.stats()
        if self._ledger.closed:
            return PoolFull("the memory pool is closed")
        return PoolFull(
            f"no {nbytes} bytes came free in the memory pool in time: of {stats.capacity_bytes} bytes "
            f"{stats.leased_bytes} are leased and {stats.used_bytes - stats.leased_bytes} more are held"
            + ("" if reserve else f", and {stats.reserved_bytes} are reserved for loads")
        )

    def _count_refusal(self) -> None:
        with self._ledger.collecting, self._ledger.lock:
            self._ledger.settle()
            self._num_refused += 1

    def _report_lost(self) -> None:
        ledger = self._ledger
        if ledger.notes:
            ledger.collect()
        while ledger.lost:
            try:
                event = ledger.lost.popleft()
            except IndexError:  # another thread reported it
                return
            log.warning(
                "a lease of %d bytes by %s was dropped without release%s",
                event.nbytes,
                event.owner,
                f"; taken at\n{event.origin}" if event.origin else "",
            )
            if self._events is not None:
                self._events.emit(event)


def _default_grain(capacity_bytes: int) -> int:
    """A 128th of the pool, at most 32 MiB; in whole huge pages, or in pages where the pool is small.

    Coarser grains leave more of a slab empty where many sizes (tails) have few frames each.
    """
    unit = HUGE_PAGE if capacity_bytes >= _GRAINS * HUGE_PAGE else PAGE
    return max(unit, min(capacity_bytes // _GRAINS // unit * unit, _MAX_GRAIN_NBYTES))
