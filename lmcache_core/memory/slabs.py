"""Slabs and slots: one size class's pieces of the pool's memory, and which of its slots a frame gets.

A *slab* is a run of the pool's memory cut into *slots* of one size, its *class*; a frame takes one slot.
`slab_table.py` says which memory a slab has. Nothing here locks or calls out: `Ledger` guards it.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from lmcache_core.memory.lease import Hold


class Slot:
    """Room for one frame, and what refers to it."""

    __slots__ = ("holds", "leases", "nbytes", "offset", "orphan", "residents", "slab")

    def __init__(self, slab: Slab, offset: int) -> None:
        self.slab = slab
        self.offset = offset
        self.nbytes = slab.size_class.slot_nbytes
        self.leases = 0  # quarantined ones included
        self.holds: list[ref[Hold]] = []  # weak: a hold that nobody keeps is dropped
        self.residents = 0  # holds without `on_evict`: only the reclaimer may end these
        self.orphan = False  # in `SizeClass.orphans`: unleased, held by waiting writes alone

    def live_holds(self) -> list[Hold]:
        return [hold for hold in (reference() for reference in self.holds) if hold is not None]


class Slab:
    """A run of grains given to one class."""

    __slots__ = (
        "changed",
        "draining",
        "first",
        "fresh",
        "newest",
        "num_free",
        "num_leased",
        "num_slots",
        "offset",
        "recycled",
        "size_class",
        "span",
        "stale",
        "used",
    )

    def __init__(self, size_class: SizeClass, first: int, span: int, offset: int, num_slots: int) -> None:
        self.size_class = size_class
        self.first = first
        self.span = span
        self.offset = offset
        self.num_slots = num_slots
        self.num_free = num_slots
        self.num_leased = 0  # slots with a lease: while any, the slab can't be emptied
        self.fresh = 0  # slots never used yet, hence not faulted in: taken last
        self.recycled: list[Slot] = []
        self.used: dict[Slot, None] = {}
        self.newest = 0  # the latest tick of any hold in it: the slab is as cold as that
        self.stale = False  # `newest` may be too high: the hold that set it was dropped
        self.changed = 0  # the ledger's generation when a slot of it was last freed or made evictable
        self.draining = False  # being emptied: gives no slot, and keeps its grains until that is over

    def take(self) -> Slot:
        if self.recycled:
            slot = self.recycled[-1]
            del self.recycled[-1]
        else:
            slot = Slot(self, self.offset + self.fresh * self.size_class.slot_nbytes)
            self.fresh += 1
        self.num_free -= 1
        self.used[slot] = None
        return slot

    def coldness(self) -> int:
        if self.stale:
            ticks = (hold.tick for slot in self.used for hold in slot.live_holds())
            self.newest = max(ticks, default=0)
            self.stale = False
        return self.newest


_num_free = operator.attrgetter("num_free")


class SizeClass:
    """The slabs cut into slots of one size. Exists while it has a slab."""

    __slots__ = ("fullest", "orphans", "partial", "slabs", "slot_nbytes")

    def __init__(self, slot_nbytes: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.slabs: dict[Slab, None] = {}
        self.partial: dict[Slab, None] = {}  # not draining, with a free slot
        self.fullest: Slab | None = None  # of `partial`; None when it has to be searched
        self.orphans: OrderedDict[Slot, None] = OrderedDict()  # oldest first

    def take(self) -> Slot | None:
        slab = self.fullest
        if slab is None:
            if not self.partial:
                return None
            slab = self.fullest = min(self.partial, key=_num_free)
        slot = slab.take()
        if not slab.num_free:
            del self.partial[slab]
            self.fullest = None
        return slot

    def offer(self, slab: Slab) -> None:
        """`slab` has one more free slot, or came back from draining with some."""
        self.partial[slab] = None
        if self.fullest is slab:
            if len(self.partial) > 1:
                self.fullest = None
        elif self.fullest is None:
            if len(self.partial) == 1:
                self.fullest = slab
        elif slab.num_free < self.fullest.num_free:
            self.fullest = slab

    def withdraw(self, slab: Slab) -> None:
        """`slab` gives no more slots."""
        if self.fullest is slab:
            self.fullest = None
        self.partial.pop(slab, None)
