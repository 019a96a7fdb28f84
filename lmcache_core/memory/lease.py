"""Leases and holds: the two ways to refer to a slot of the pool.

A lease gives access to bytes and is never taken away. A hold keeps bytes only as long as nobody
needs the room: eviction may end it, and then it leases no more.
"""

from __future__ import annotations

import ctypes
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lmcache_core.errors import LeaseError
from lmcache_core.events import LeaseLost

if TYPE_CHECKING:
    from lmcache_core.identity.keys import StorageKey
    from lmcache_core.memory.ledger import Claim, Ledger
    from lmcache_core.memory.slabs import Slot

_ORIGIN_FRAMES = 8


@lru_cache(maxsize=256)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes


class Lease:
    """Access to the bytes of one slot until `release`. Thread-safe; made by the pool, never by callers.

    A context manager: leaving it releases the lease unless that was done inside. A lease that is
    garbage-collected unreleased is counted and reported as lost, and its memory comes back.
    """

    __slots__ = (
        "_claim",
        "_exporter",
        "_ledger",
        "_memory",
        "_slot",
        "_unreleased",
        "address",
        "nbytes",
        "offset",
        "origin",
        "owner",
        "slot_nbytes",
    )

    def __init__(self, ledger: Ledger, claim: Claim, nbytes: int, owner: str) -> None:
        slot = claim[0]
        self._unreleased = True  # who deletes it releases: one thread alone, without a lock
        self._slot: Slot | None = slot
        self._ledger = ledger
        self._memory: memoryview | None = None
        self._exporter: weakref.ref[ctypes.Array[ctypes.c_ubyte]] | None = None
        self.nbytes = nbytes
        self.slot_nbytes = slot.nbytes
        """What the frame takes of the pool."""
        self.owner = owner
        self.offset = slot.offset
        """Of the first byte in `MemoryPool.buffer`; a multiple of 4096."""
        self.address = ledger.mapping.address + slot.offset
        self.origin = "".join(traceback.format_stack(limit=_ORIGIN_FRAMES)[:-1]) if ledger.debug else ""
        self._claim = claim  # emptied once the ledger has been told: until then `__del__` would tell it

    @property
    def memory(self) -> memoryview:
        """The bytes, writable, `nbytes` of them: the same object each time, invalid after `release`.

        Whatever is derived from it and outlives the lease (slices, arrays) stays valid: the slot is
        quarantined, that is, not reused, until the last of it is gone.

        Raises:
            LeaseError: already released.
        """
        memory = self._memory
        return memory if memory is not None else self._export()

    @property
    def released(self) -> bool:
        return self._slot is None

    def share(self, owner: str) -> Lease:
        """One more lease on the same bytes, to be released by itself.

        Raises:
            LeaseError: already released.
        """
        lease = _one_more(self._ledger, self, owner)
        if lease is None:
            raise LeaseError(f"a lease of {self.owner} was shared after its release")
        return lease

    def hold(self, tag: StorageKey | None = None, on_evict: Callable[[Hold], None] | None = None) -> Hold:
        """An evictable reference to the same bytes. It does not keep the lease, nor the lease it.

        Without `on_evict` it is a *resident*: only the pool's reclaimer ends it. With it, it is a
        waiting write: the pool may end it at any time, then calls `on_evict(hold)` once, without a
        lock, on the thread that needed the room. Whoever wants it kept keeps the object: a hold that
        is garbage-collected is dropped.

        Raises:
            LeaseError: already released.
        """
        ledger = self._ledger
        with ledger.lock:
            slot = self._slot
            if slot is not None:
                held = Hold(ledger, slot, self.nbytes, tag, on_evict)
                ledger.add_hold(slot, held.reference, on_evict is None)
        if ledger.notes:
            ledger.collect()
        if slot is None:
            raise LeaseError(f"a lease of {self.owner} was held after its release")
        return held

    def release(self) -> None:
        """Ends the access; never blocks. The memory is reused once nothing leases, holds or views it.

        Raises:
            LeaseError: already released.
        """
        try:
            del self._unreleased
        except AttributeError:
            raise LeaseError(f"a lease of {self.owner} was released twice") from None
        self._slot = None
        memory, self._memory = self._memory, None
        try:
            if memory is not None:
                memory.release()
        except BufferError:
            pass  # in use now: quarantined until that is over
        finally:
            del memory
            self._ledger.post(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._slot is not None:
            self.release()

    def __del__(self) -> None:
        if getattr(self, "_claim", None):  # unset where Ctrl-C came first
            self._slot = None  # another finalizer of the same cycle may still hold this object
            event = LeaseLost(owner=self.owner, nbytes=self.nbytes, origin=self.origin)
            self._ledger.post(self._ledger.lose_lease, self._claim, self._exporter, event)

    def __repr__(self) -> str:
        state = "released" if self._slot is None else f"offset={self.offset}"
        return f"Lease(owner={self.owner!r}, nbytes={self.nbytes}, {state})"

    def _export(self) -> memoryview:
        ledger = self._ledger
        with ledger.lock:
            if self._slot is not None and self._memory is None:
                # An exporter of this lease's own: it lives exactly as long as anything views these bytes.
                array_type = _array_type(self.nbytes)
                exporter = array_type.from_buffer(ledger.mapping.memory, ledger.mapping.start + self.offset)
                self._exporter = weakref.ref(exporter)
                self._memory = memoryview(exporter).cast("B")
            memory = self._memory
        if ledger.notes:
            ledger.collect()
        if memory is None:
            raise LeaseError(f"a lease of {self.owner} was used after its release")
        return memory

    def _end(self) -> None:
        self._ledger.end_lease(self._claim, self._exporter)


class Hold:
    """A reference that eviction may end: a frame resident in a memory tier, or one waiting to be written.

    Thread-safe. `tick` is the latest that `touch` was given; a new hold starts at the latest of all.
    """

    __slots__ = (
        "__weakref__",
        "_home",
        "_ledger",
        "_on_evict",
        "_removed",
        "_slot",
        "nbytes",
        "reference",
        "slot_nbytes",
        "tag",
        "tick",
    )

    def __init__(
        self,
        ledger: Ledger,
        slot: Slot,
        nbytes: int,
        tag: StorageKey | None,
        on_evict: Callable[[Hold], None] | None,
    ) -> None:
        self._home = slot
        self._slot: Slot | None = slot
        self._ledger = ledger
        self._on_evict = on_evict
        self.nbytes = nbytes
        self.slot_nbytes = slot.nbytes
        self.tag = tag
        self.tick = ledger.latest_tick
        self.reference = weakref.ref(self)  # the pool's own, weak, and this hold's name in its slot
        self._removed = False  # from the ledger: until then `__del__` would have it removed

    @property
    def resident(self) -> bool:
        """True without `on_evict`: only the reclaimer ends it."""
        return self._on_evict is None

    @property
    def alive(self) -> bool:
        """False once dropped or evicted."""
        return self._slot is not None

    @property
    def leased(self) -> bool:
        """True while anything leases the slot: evicting it would free nothing."""
        slot = self._slot
        return slot is not None and slot.leases > 0

    def lease(self, owner: str) -> Lease | None:
        """Access to the bytes, or None once dropped or evicted."""
        return _one_more(self._ledger, self, owner)

    def touch(self, tick: int) -> None:
        """Says that the frame was used at `tick`, a number that grows. Lock-free.

        Two threads that touch at once may leave the older of their two ticks: only coldness is lost.
        """
        if tick > self.tick:
            self.tick = tick
            slot = self._slot
            if slot is not None:
                self._ledger.note_tick(slot, tick)

    def evict(self) -> bool:
        """Takes the frame away unless it is leased: ends this hold and all waiting writes of the slot.

        What a reclaimer calls. From the moment it decides, `lease` answers None. The waiting writes'
        `on_evict` run on this thread before it returns: call it without a lock. Other residents of
        the same bytes stay, and then so do the waiting writes. False: leased, or no longer alive, and
        nothing changed.
        """
        ledger = self._ledger
        ended: list[Hold] = []
        try:
            with ledger.lock:
                ledger.settle()
                slot = self._slot
                if slot is not None and not slot.leases:
                    ledger.end_holds(slot, self, ended)
            if ledger.notes:
                ledger.collect()
        finally:
            tell_evicted(ended[1:])
        return bool(ended)

    def drop(self) -> None:
        """Ends this reference alone, without telling anyone. Idempotent, never blocks."""
        if self._slot is not None:
            self._slot = None
            self._ledger.post(self._end)

    def end(self) -> None:
        """For the pool: `drop`, with the ledger's lock held."""
        if self._slot is not None:
            self._slot = None
            self._end()

    def tell_evicted(self) -> None:
        """For the pool: runs `on_evict`, without a lock."""
        if self._on_evict is not None:
            self._on_evict(self)

    def __del__(self) -> None:
        if not getattr(self, "_removed", True):  # unset where Ctrl-C came first
            self._slot = None
            ledger = self._ledger
            ledger.post(ledger.remove_hold, self._home, self.reference, self._on_evict is None, self.tick)

    def __repr__(self) -> str:
        state = "dropped" if self._slot is None else ("resident" if self._on_evict is None else "waiting")
        return f"Hold(tag={self.tag!r}, nbytes={self.nbytes}, {state})"

    def _end(self) -> None:
        self._ledger.remove_hold(self._home, self.reference, self._on_evict is None, self.tick)
        self._removed = True


def tell_evicted(holds: Sequence[Hold]) -> None:
    """Runs the `on_evict` of each, whatever the others raise, without a lock.

    Raises:
        What the first of them raised that did.
    """
    for position, hold in enumerate(holds):
        try:
            hold.tell_evicted()
        except BaseException:
            tell_evicted(holds[position + 1 :])
            raise


def _one_more(ledger: Ledger, of: Lease | Hold, owner: str) -> Lease | None:
    """A new lease on the slot of a lease or hold; None once that is over."""
    claim: Claim = []
    try:
        with ledger.lock:
            slot = of._slot
            if slot is not None:
                ledger.add_lease(slot, claim)
        if ledger.notes:
            ledger.collect()
        return Lease(ledger, claim, of.nbytes, owner) if claim else None
    except BaseException:
        ledger.disclaim(claim)
        raise
