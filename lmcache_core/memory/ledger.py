"""What refers to each slot, under the pool's one lock; and when memory came free."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_core.events import LeaseLost

if TYPE_CHECKING:
    from lmcache_core.memory.lease import Hold
    from lmcache_core.memory.mapping import Mapping
    from lmcache_core.memory.slabs import SlabTable, Slot

Exporter = weakref.ref[ctypes.Array[ctypes.c_ubyte]]


class Ledger:
    """Counts leases and holds, frees a slot when its last one goes, and wakes who waits for that.

    Methods are called with `lock` held unless they say otherwise. Nothing is called out to under it.
    `__del__` and weakref callbacks run anywhere, even inside a critical section of the same thread, so
    they only leave a note in `abandoned` and settle it if the lock happens to be free. Whoever releases
    the lock calls `collect` when there are notes: so none stays behind.
    """

    def __init__(self, table: SlabTable, mapping: Mapping, *, reserved_bytes: int, debug: bool) -> None:
        self.lock = threading.Lock()  # guards the table, the counts of every slot, and the numbers below
        self.changed = threading.Condition(self.lock)
        self.table = table
        self.mapping = mapping
        self.debug = debug
        self.unreserved_bytes = table.capacity_bytes - reserved_bytes  # the most leased without `reserve`
        self.generation = 0  # grows when a slot comes free or can be evicted again
        self.num_wakes = 0  # calls of `wake_all`
        self.draining = False  # some thread is emptying slabs
        self.num_drained_slabs = 0
        self.closed = False
        self.num_waiting = 0  # threads in `changed.wait`
        self.num_leases = 0
        self.num_holds = 0
        self.leased_bytes = 0  # slots with a lease, quarantined ones included
        self.held_bytes = 0  # slots with a hold
        self.num_lost = 0
        self.latest_tick = 0  # written without the lock: it only orders holds that nobody touched
        self.abandoned: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self.lost: deque[LeaseLost] = deque()  # to be reported by a call that may call out
        self.quarantined: dict[Exporter, Slot] = {}

    def may_lease(self, nbytes: int, reserve: bool) -> bool:
        return reserve or self.leased_bytes + nbytes <= self.unreserved_bytes

    def take(self, slot_nbytes: int, reserve: bool, *, larger: bool = False) -> Slot | None:
        """A leased slot of this size, or `larger`, where one is free."""
        if self.closed or not self.may_lease(slot_nbytes, reserve):
            return None
        table = self.table
        slot = table.take_larger(slot_nbytes) if larger else table.take(slot_nbytes)
        if slot is not None:
            self.add_lease(slot)
        return slot

    def add_lease(self, slot: Slot) -> None:
        if not slot.leases:
            slot.slab.num_leased += 1
            self.leased_bytes += slot.nbytes
            if slot.orphan:
                slot.orphan = False
                del slot.slab.size_class.orphans[slot]
        slot.leases += 1
        self.num_leases += 1

    def remove_lease(self, slot: Slot) -> None:
        self.num_leases -= 1
        self._end_access(slot)

    def add_hold(self, slot: Slot, reference: weakref.ref[Hold], resident: bool) -> None:
        """The slot is leased by the caller, so it is no orphan."""
        if not slot.holds:
            self.held_bytes += slot.nbytes
        slot.holds.append(reference)
        slot.residents += resident
        self.num_holds += 1
        slab = slot.slab
        if self.latest_tick > slab.newest:
            slab.newest = self.latest_tick

    def remove_hold(self, slot: Slot, reference: weakref.ref[Hold], resident: bool, tick: int) -> None:
        """Does nothing when it was removed before: a dying hold and its eviction may cross."""
        if reference not in slot.holds:
            return
        slot.holds.remove(reference)
        slot.residents -= resident
        self.num_holds -= 1
        if not slot.holds:
            self.held_bytes -= slot.nbytes
        if tick >= slot.slab.newest:
            slot.slab.stale = True
        if not slot.leases:
            self._settle(slot)

    def end_holds(self, slot: Slot, hold: Hold) -> list[Hold]:
        """Ends `hold`, and with it all waiting writes unless another resident stays. Returns the ended."""
        others_stay = slot.residents - hold.resident > 0
        ended = [hold] if others_stay else [hold, *(h for h in slot.live_holds() if h is not hold)]
        for each in ended:
            each.end()
        return ended

    def note_tick(self, slot: Slot, tick: int) -> None:
        """Called without the lock."""
        slab = slot.slab
        if tick > slab.newest:
            slab.newest = tick
        if tick > self.latest_tick:
            self.latest_tick = tick

    def quarantine(self, slot: Slot, exporter: Exporter) -> None:
        """Ends a lease whose bytes were looked at: frees them once no view is left.

        Called without the lock.
        """
        with self.lock:
            self.num_leases -= 1
            self._end_viewed(slot, exporter)
        if self.abandoned:
            self.collect()

    def lose(self, slot: Slot, exporter: Exporter | None, event: tuple[str, int, str]) -> None:
        """A lease was garbage-collected. Called without the lock, from anywhere."""
        self.abandoned.append((self._settle_lost, (slot, exporter, event)))
        self.collect()

    def forget(self, slot: Slot, reference: weakref.ref[Hold], resident: bool, tick: int) -> None:
        """A hold was garbage-collected. Called without the lock, from anywhere."""
        self.abandoned.append((self.remove_hold, (slot, reference, resident, tick)))
        self.collect()

    def collect(self) -> None:
        """Settles the notes in `abandoned` unless somebody holds the lock, who will. Never blocks."""
        while self.abandoned and self.lock.acquire(blocking=False):
            try:
                self.settle_abandoned()
            finally:
                self.lock.release()

    def settle_abandoned(self) -> None:
        while self.abandoned:
            settle, note = self.abandoned.popleft()
            settle(*note)

    def wake_all(self) -> None:
        """What could not be evicted before may be tried again."""
        self.num_wakes += 1
        self.wake()

    def wake(self) -> None:
        """Something came free or may be evicted."""
        self.generation += 1
        if self.num_waiting:
            self.changed.notify_all()

    def check(self) -> None:
        """Asserts what must hold between calls."""
        self.table.check()
        leased_bytes = held_bytes = num_leases = num_holds = 0
        for size_class in self.table.classes.values():
            orphans = set()
            for slab in size_class.slabs:
                assert slab.num_leased == sum(slot.leases > 0 for slot in slab.used)
                for slot in slab.used:
                    assert slot.leases or slot.holds, "a slot without references is free"
                    assert slot.residents <= len(slot.holds)
                    leased_bytes += slot.nbytes * (slot.leases > 0)
                    held_bytes += slot.nbytes * bool(slot.holds)
                    num_leases += slot.leases
                    num_holds += len(slot.holds)
                    if not slot.leases and not slot.residents:
                        orphans.add(slot)
            assert orphans == set(size_class.orphans)
            assert all(slot.orphan for slot in orphans)
        assert (leased_bytes, held_bytes) == (self.leased_bytes, self.held_bytes)
        assert num_leases == self.num_leases + len(self.quarantined)
        assert num_holds == self.num_holds

    def _end_viewed(self, slot: Slot, reference: Exporter) -> None:
        exporter = reference()
        if exporter is None:
            self._end_access(slot)
            return
        self.quarantined[weakref.ref(exporter, self._unviewed)] = slot
        del exporter  # perhaps the last reference: then `_unviewed` runs here and leaves a note

    def _unviewed(self, reference: Exporter) -> None:
        """The last view of a quarantined slot is gone. Called without the lock, from anywhere."""
        self.abandoned.append((self._end_quarantine, (reference,)))
        self.collect()

    def _end_quarantine(self, reference: Exporter) -> None:
        self._end_access(self.quarantined.pop(reference))

    def _settle_lost(self, slot: Slot, exporter: Exporter | None, event: tuple[str, int, str]) -> None:
        owner, nbytes, origin = event
        self.num_lost += 1
        self.lost.append(LeaseLost(owner=owner, nbytes=nbytes, origin=origin))
        if exporter is None:
            self.remove_lease(slot)
        else:
            self.num_leases -= 1
            self._end_viewed(slot, exporter)

    def _end_access(self, slot: Slot) -> None:
        slot.leases -= 1
        if not slot.leases:
            slot.slab.num_leased -= 1
            self.leased_bytes -= slot.nbytes
            self._settle(slot)

    def _settle(self, slot: Slot) -> None:
        """`slot` has no lease: it is free, an orphan, or a resident that can be evicted."""
        if not slot.holds:
            if slot.orphan:
                slot.orphan = False
                del slot.slab.size_class.orphans[slot]
            self.table.give(slot)
        elif not slot.residents and not slot.orphan:
            slot.orphan = True
            slot.slab.size_class.orphans[slot] = None
        self.wake()
        slot.slab.changed = self.generation
