"""What refers to each slot, under the pool's one lock; and when memory came free."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from lmcache_core.events import LeaseLost

if TYPE_CHECKING:
    from lmcache_core.memory.lease import Hold
    from lmcache_core.memory.mapping import Mapping
    from lmcache_core.memory.slab_table import SlabTable
    from lmcache_core.memory.slabs import Slot

Exporter = weakref.ref[ctypes.Array[ctypes.c_ubyte]]

Claim = list["Slot"]
"""One leased slot until it has been given back, then none. Changed under the lock."""

_AT_ONCE = (False,)  # what `Lock.acquire` takes for "don't block"


class Ledger:
    """Counts leases and holds, frees a slot when its last one goes, and wakes who waits for that.

    Methods are called with `lock` held unless they say otherwise. Nothing is called out to under it.
    What gives memory back (release, drop, a finalizer, a dying view) may run anywhere, even from a
    garbage collection inside a critical section of the same thread: so it never waits for the lock,
    but posts a note of what is to be done. Whoever takes the lock settles the notes there are before
    it reads, and calls `collect` after it let go: so none stays behind.

    Ctrl-C may come after any call and at the start of any function (not inside a C function, and not
    between one of those and the step of Python that called it). It leaves no lock held: `lock` is taken by
    a plain `with`, never through a context manager of ours. It leaves no lease: counts that belong together
    change without a call in between; a leased slot is in a `claim`, which its lease, or who was to make one,
    has the ledger end; and a note that was cut short is settled again, which does nothing twice. What Python
    can't rule out: within the slab table it can leave one free slot unused as long as its slab has frames,
    and between a hold's eviction and `on_evict` it can suppress that call.
    """

    def __init__(self, table: SlabTable, mapping: Mapping, *, reserved_bytes: int, debug: bool) -> None:
        self.lock = threading.Lock()  # guards the table, the counts of every slot, and the numbers below
        self.table = table
        self.mapping = mapping
        self.debug = debug
        self.unreserved_bytes = table.capacity_bytes - reserved_bytes  # the most leased without `reserve`
        self.generation = 0  # grows when a slot comes free or can be evicted again
        self.num_wakes = 0  # calls of `wake_all`
        self.draining = False  # some thread is emptying slabs
        self.num_drained_slabs = 0
        self.closed = False
        self.waiters: list[threading.Lock] = []  # each is released once, when something may have changed
        self.num_leases = 0
        self.num_holds = 0
        self.leased_bytes = 0  # slots with a lease, quarantined ones included
        self.held_bytes = 0  # slots with a hold
        self.num_lost = 0
        self.latest_tick = 0  # written without the lock: it only orders holds that nobody touched
        self.notes: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self.lost: deque[LeaseLost] = deque()  # to be reported by a call that may call out
        self.quarantined: dict[int, tuple[Exporter, Claim]] = {}  # by the id of the reference
        self.collecting = _Collecting(self)
        """`with collecting, lock: settle()` is for where a microsecond doesn't count."""

    def room(self, reserve: bool) -> int:
        """Bytes that may be leased on top of what is: how much is free or evictable is another matter."""
        return (self.table.capacity_bytes if reserve else self.unreserved_bytes) - self.leased_bytes

    def slot_nbytes(self, nbytes: int, reserve: bool) -> int:
        """The slot size that a frame of `nbytes` gets."""
        return self.table.slot_nbytes(nbytes, at_most=self.room(reserve))

    def take(self, slot_nbytes: int, reserve: bool, claim: Claim, *, larger: bool = False) -> bool:
        """Puts a leased slot of this size, or a `larger` one, into `claim`, where one is free."""
        room = self.room(reserve)
        if self.closed or slot_nbytes > room:
            return False
        slot = self.table.take_larger(slot_nbytes, room) if larger else self.table.take(slot_nbytes)
        if slot is None:
            return False
        try:
            self.add_lease(slot, claim)
        except BaseException:
            if not claim:
                self.table.give(slot)
            raise
        return True

    def add_lease(self, slot: Slot, claim: Claim) -> None:
        if not slot.leases:
            slot.slab.num_leased += 1
            self.leased_bytes += slot.nbytes
            if slot.orphan:
                slot.orphan = False
                del slot.slab.size_class.orphans[slot]
        slot.leases += 1
        self.num_leases += 1
        claim.append(slot)

    def disclaim(self, claim: Claim) -> None:
        """Gives back what is in `claim`, unless a lease has done so. Called as `post`."""
        self.post(self.end_lease, claim, None)

    def end_lease(self, claim: Claim, reference: Exporter | None) -> None:
        """Ends a lease, or quarantines the slot while something views the bytes it exported.

        Does nothing when that was done before: a release that Ctrl-C cut short may come again.
        """
        exporter = reference() if reference is not None else None
        if not claim:
            return
        if exporter is None:
            self._end_access(claim, released=True)
            return
        watch = weakref.ref(exporter, self._unviewed)
        self.quarantined[id(watch)] = watch, [claim[0]]
        del claim[0]
        self.num_leases -= 1
        del exporter  # perhaps the last reference: then `_unviewed` runs here and posts a note

    def lose_lease(self, claim: Claim, reference: Exporter | None, event: LeaseLost) -> None:
        """A lease was garbage-collected."""
        if not claim:  # released after all, by a finalizer of the same cycle
            return
        self.num_lost += 1
        self.lost.append(event)
        self.end_lease(claim, reference)

    def add_hold(self, slot: Slot, reference: weakref.ref[Hold], resident: bool) -> None:
        """The slot is leased by the caller, so it is no orphan."""
        if not slot.holds:
            self.held_bytes += slot.nbytes
        slot.holds += (reference,)
        slot.residents += resident
        self.num_holds += 1
        slab = slot.slab
        if self.latest_tick > slab.newest:
            slab.newest = self.latest_tick

    def remove_hold(self, slot: Slot, reference: weakref.ref[Hold], resident: bool, tick: int) -> None:
        """Does nothing when it was removed before: a dying hold and its eviction may cross."""
        if reference not in slot.holds:
            return
        del slot.holds[slot.holds.index(reference)]
        slot.residents -= resident
        self.num_holds -= 1
        if not slot.holds:
            self.held_bytes -= slot.nbytes
        if tick >= slot.slab.newest:
            slot.slab.stale = True
        if not slot.leases:
            try:
                self._unleased(slot)
            except BaseException:
                self._unleased(slot)
                raise

    def end_holds(self, slot: Slot, hold: Hold, ended: list[Hold]) -> None:
        """Ends `hold`, and all waiting writes unless another resident stays; lists them in `ended`."""
        others_stay = slot.residents - hold.resident > 0
        ended += [hold] if others_stay else [hold, *(h for h in slot.live_holds() if h is not hold)]
        for each in ended:
            each.end()

    def note_tick(self, slot: Slot, tick: int) -> None:
        """Called without the lock."""
        slab = slot.slab
        if tick > slab.newest:
            slab.newest = tick
        if tick > self.latest_tick:
            self.latest_tick = tick

    def post(self, settle: Callable[..., None], *note: object) -> None:
        """Has `settle(*note)` run under the lock: now if it is free, else by who holds it.

        Called without the lock or with it, from anywhere. Never blocks.
        """
        self.notes.append((settle, note))
        self.collect()

    def collect(self) -> None:
        """Settles the notes unless somebody holds the lock, who will. Called as `post`."""
        while self.notes:
            taken: list[bool] = []
            try:
                taken.extend(map(self.lock.acquire, _AT_ONCE))  # one step: Ctrl-C finds both done, or neither
                if not taken[0]:
                    return
                self.settle()
            finally:
                if taken and taken[0]:
                    self.lock.release()

    def settle(self) -> None:
        while self.notes:
            settle, note = self.notes[0]
            settle(*note)  # does nothing the second time: one that Ctrl-C cut short stays and comes again
            self.notes.popleft()

    def wait(self, seen: int, timeout_s: float, *, for_drain: bool) -> None:
        """Blocks until the generation is not `seen`, or a drain ends; at most for `timeout_s`.

        With `for_drain`, not while there is none. Called without the lock.
        """
        waiter = threading.Lock()
        with self.lock:
            changed = self.generation != seen or (for_drain and not self.draining)
            if not changed:
                waiter.acquire()
                self.waiters.append(waiter)
        if self.notes:
            self.collect()
        if changed or waiter.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return
        with self.lock:
            if waiter in self.waiters:
                self.waiters.remove(waiter)
        if self.notes:
            self.collect()

    def wake_all(self) -> None:
        """What could not be evicted before may be tried again."""
        self.num_wakes += 1
        self.wake()

    def wake(self) -> None:
        """Something came free or may be evicted."""
        self.generation += 1
        self.stir()

    def stir(self) -> None:
        """Has those that wait look again."""
        if self.waiters:
            for waiter in self.waiters:
                waiter.release()
            self.waiters.clear()

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

    def _unviewed(self, watch: Exporter) -> None:
        """The last view of a quarantined slot is gone. Called as `post`."""
        self.post(self._end_quarantine, id(watch))

    def _end_quarantine(self, watch_id: int) -> None:
        if watch_id in self.quarantined:
            _, claim = self.quarantined[watch_id]
            self._end_access(claim, released=False)
            del self.quarantined[watch_id]

    def _end_access(self, claim: Claim, *, released: bool) -> None:
        if not claim:
            return
        slot = claim[0]
        del claim[0]
        self.num_leases -= released
        slot.leases -= 1
        if not slot.leases:
            slot.slab.num_leased -= 1
            self.leased_bytes -= slot.nbytes
            try:
                self._unleased(slot)
            except BaseException:
                self._unleased(slot)
                raise

    def _unleased(self, slot: Slot) -> None:
        """`slot` has no lease: it is free, an orphan, or a resident that can be evicted. Idempotent."""
        if not slot.holds:
            if slot.orphan:
                slot.orphan = False
                del slot.slab.size_class.orphans[slot]
            if slot in slot.slab.used:
                self.table.give(slot)
        elif not slot.residents and not slot.orphan:
            slot.orphan = True
            slot.slab.size_class.orphans[slot] = None
        self.wake()
        slot.slab.changed = self.generation


class _Collecting:
    """Collects notes at the end of a block; goes around the block that holds the lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ledger.notes:
            self._ledger.collect()
