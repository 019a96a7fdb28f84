"""How the pool's memory is divided: which slab has which of it, and which slabs leave for another size.

The memory is a row of equal *grains*. A slab is a run of adjacent grains. A slab whose last slot comes
free gives its grains back, so they may serve any class next. Nothing here locks or calls out: `Ledger`
guards it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmcache_core.memory.slabs import SizeClass, Slab, Slot

if TYPE_CHECKING:
    from lmcache_core.memory.lease import Hold

PAGE = 4096
"""Slots start and end at multiples of this, as every stored value and view does."""

MAX_WASTE = 8
"""A slab should leave at most one part in this many unused, and a frame in its slot likewise."""

MAX_SPAN = 8
"""Grains that a slab spans at most, when one frame does not need more."""

Refused = dict[Slab, int]
"""Slabs that could not be emptied, each with the ledger's generation after the attempt."""


class SlabTable:
    """Who has which bytes of `[0, capacity_bytes)`. The last grain may be shorter than the others."""

    def __init__(self, capacity_bytes: int, grain_nbytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.grain_nbytes = grain_nbytes
        self.num_grains = -(-capacity_bytes // grain_nbytes)
        self.used_bytes = 0  # slots in use
        self.classes: dict[int, SizeClass] = {}
        self.num_slabs = 0
        self._free = bytearray(b"\1" * self.num_grains)  # 1: free. Runs are found by bytes.find
        self._owners: list[Slab | None] = [None] * self.num_grains

    @property
    def num_free_grains(self) -> int:
        return self._free.count(1)

    def slot_nbytes(self, nbytes: int, at_most: int) -> int:
        """The slot size for a frame of `nbytes`: its own, or a living class's that wastes little."""
        exact = -(-nbytes // PAGE) * PAGE
        if exact in self.classes:
            return exact
        most = min(exact * MAX_WASTE // (MAX_WASTE - 1), at_most)
        return min((size for size in self.classes if exact < size <= most), default=exact)

    def take(self, slot_nbytes: int) -> Slot | None:
        """A slot of the fullest slab of the class, or of a new slab where grains are free."""
        size_class = self.classes.get(slot_nbytes)
        slot = size_class.take() if size_class is not None else None
        if slot is None:
            slab = self._carve(slot_nbytes)
            if slab is None:
                return None
            try:
                slot = slab.size_class.take()
            except BaseException:  # Ctrl-C: a slab without frames would keep its grains
                self.mend([slab])
                raise
            assert slot is not None
        self.used_bytes += slot_nbytes
        return slot

    def take_larger(self, slot_nbytes: int, at_most: int) -> Slot | None:
        """A free slot of the smallest larger class that has one: wasteful, but better than refusing."""
        larger = (c for size, c in self.classes.items() if slot_nbytes < size <= at_most and c.partial)
        size_class = min(larger, key=operator.attrgetter("slot_nbytes"), default=None)
        if size_class is None:
            return None
        self.used_bytes += size_class.slot_nbytes
        return size_class.take()

    def larger_sizes(self, slot_nbytes: int, at_most: int) -> list[int]:
        return sorted(size for size in self.classes if slot_nbytes < size <= at_most)

    def give(self, slot: Slot) -> None:
        """`slot` is free again."""
        slab = slot.slab
        del slab.used[slot]
        slab.recycled += (slot,)
        slab.num_free += 1
        self.used_bytes -= slot.nbytes
        if slab.draining:
            return
        try:
            self._settle(slab)
        except BaseException:  # Ctrl-C: without it the slab would give no more slots
            self._settle(slab)
            raise

    def start_drain(self, slab: Slab) -> None:
        slab.draining = True
        slab.size_class.withdraw(slab)

    def end_drain(self, slab: Slab) -> None:
        slab.draining = False
        if slab.num_free:
            self._settle(slab)

    def mend(self, slabs: Iterable[Slab]) -> None:
        """Gives back the grains of those `slabs` that Ctrl-C left without frames."""
        for slab in slabs:
            if not slab.used and not slab.draining:
                self._settle(slab)

    def coldest_run(self, slot_nbytes: int, refused: Refused) -> tuple[int, list[Slab]] | None:
        """The slabs of other classes to empty so that one of this class fits, with their latest tick.

        Skips slabs with a lease, and `refused` ones that did not change since.
        """
        if len(self.classes) - (slot_nbytes in self.classes) == 0:
            return None
        for span in self._spans(slot_nbytes):
            run = self._coldest_slab(slot_nbytes, refused) if span == 1 else None
            if run is None:  # also for a span of 1 where only the short last grain is coldest
                run = self._coldest_span(span, slot_nbytes, refused)
            if run is not None:
                return run
        return None

    def coldest_residents(self, slot_nbytes: int, limit: int) -> list[Hold]:
        """Residents of unleased slots of the class, one a slot: the coldest slab's first."""
        size_class = self.classes.get(slot_nbytes)
        found: list[Hold] = []
        for slab in sorted(size_class.slabs, key=Slab.coldness) if size_class is not None else ():
            holds = [
                hold for slot in slab.used if not slot.leases for hold in slot.live_holds() if hold.resident
            ]
            found += sorted(holds, key=operator.attrgetter("tick"))
            if len(found) >= limit:
                break
        return found[:limit]

    def check(self) -> None:
        """Asserts what must hold between calls."""
        seen = bytearray(b"\1" * self.num_grains)
        used_bytes = 0
        num_slabs = 0
        for size, size_class in self.classes.items():
            assert size_class.slot_nbytes == size
            assert size_class.slabs
            for slab in size_class.slabs:
                num_slabs += 1
                assert slab.size_class is size_class
                assert slab.num_free == slab.num_slots - len(slab.used)
                assert len(slab.recycled) + len(slab.used) == slab.fresh <= slab.num_slots
                assert slab.used or slab.draining, "a slab without frames keeps its grains"
                assert (slab in size_class.partial) == (slab.num_free > 0 and not slab.draining)
                assert slab.offset == slab.first * self.grain_nbytes
                assert slab.num_slots * size <= self._run_nbytes(slab.first, slab.span)
                offsets = {slot.offset for slot in (*slab.used, *slab.recycled)}
                assert offsets == {slab.offset + i * size for i in range(slab.fresh)}
                for grain in range(slab.first, slab.first + slab.span):
                    assert self._owners[grain] is slab
                    assert seen[grain]
                    seen[grain] = 0
                used_bytes += len(slab.used) * size
            assert all(slab in size_class.slabs for slab in size_class.partial)
            fullest = size_class.fullest
            if fullest is not None:
                assert fullest.num_free == min(slab.num_free for slab in size_class.partial)
        assert seen == self._free
        assert (used_bytes, num_slabs) == (self.used_bytes, self.num_slabs)
        assert all((owner is None) == bool(free) for owner, free in zip(self._owners, seen, strict=True))

    def _settle(self, slab: Slab) -> None:
        """Offers the free slots of `slab`, or gives its grains back when all are free."""
        size_class = slab.size_class
        if slab.used:
            size_class.offer(slab)
            return
        size_class.withdraw(slab)
        if slab not in size_class.slabs:
            return
        del size_class.slabs[slab]
        if not size_class.slabs:
            del self.classes[size_class.slot_nbytes]
        self.num_slabs -= 1
        end = slab.first + slab.span
        self._free[slab.first : end] = b"\1" * slab.span
        self._owners[slab.first : end] = [None] * slab.span

    def _carve(self, slot_nbytes: int) -> Slab | None:
        for span in self._spans(slot_nbytes):
            first = self._find_run(span, slot_nbytes)
            if first is not None:
                break
        else:
            return None
        size_class = self.classes.get(slot_nbytes) or SizeClass(slot_nbytes)
        num_slots = self._run_nbytes(first, span) // slot_nbytes
        slab = Slab(size_class, first, span, first * self.grain_nbytes, num_slots)
        self._free[first : first + span] = bytes(span)
        self._owners[first : first + span] = [slab] * span
        self.num_slabs += 1
        self.classes[slot_nbytes] = size_class
        size_class.slabs[slab] = None
        try:
            size_class.offer(slab)
        except BaseException:  # Ctrl-C: without it nobody would ever take a slot of it
            self._settle(slab)
            raise
        return slab

    def _find_run(self, span: int, slot_nbytes: int) -> int | None:
        """The first grain of a free run that holds at least one slot.

        Single grains are taken from the low end and runs from the high end, which keeps runs whole.
        """
        find = self._free.find if span == 1 else self._free.rfind
        pattern = b"\1" * span
        first = find(pattern)
        if first >= 0 and self._run_nbytes(first, span) < slot_nbytes:  # ends in the short last grain
            first = find(pattern, 0, self.num_grains - 1)
        return first if first >= 0 else None

    def _run_nbytes(self, first: int, span: int) -> int:
        return min((first + span) * self.grain_nbytes, self.capacity_bytes) - first * self.grain_nbytes

    def _spans(self, slot_nbytes: int) -> tuple[int, ...]:
        """Grains per slab of a class: the fewest that waste little, then the fewest that hold a slot."""
        least = -(-slot_nbytes // self.grain_nbytes)
        most = max(least, min(self.num_grains // 4, max(MAX_SPAN, 2 * least)))
        best, best_waste = least, 1.0
        for span in range(least, most + 1):
            waste = span * self.grain_nbytes % slot_nbytes / (span * self.grain_nbytes)
            if waste < best_waste:
                best, best_waste = span, waste
            if waste * MAX_WASTE < 1:
                break
        return (best, least) if best != least else (least,)

    def _coldest_slab(self, slot_nbytes: int, refused: Refused) -> tuple[int, list[Slab]] | None:
        best: Slab | None = None
        best_tick = 0
        for size, size_class in self.classes.items():
            if size == slot_nbytes:
                continue
            for slab in size_class.slabs:
                if slab.num_leased or slab.draining:
                    continue
                if refused and refused.get(slab, -1) >= slab.changed:
                    continue
                tick = slab.coldness() if slab.stale else slab.newest
                if best is None or tick < best_tick:
                    best, best_tick = slab, tick
        if best is None or self._run_nbytes(best.first, best.span) < slot_nbytes:
            return None
        return best_tick, [best]

    def _coldest_span(self, span: int, slot_nbytes: int, refused: Refused) -> tuple[int, list[Slab]] | None:
        best_tick: int | None = None
        best_first = first = 0
        while first + span <= self.num_grains:
            tick = 0
            for grain in range(first + span - 1, first - 1, -1):
                slab = self._owners[grain]
                if slab is None:
                    continue
                if (
                    slab.num_leased
                    or slab.draining
                    or slab.size_class.slot_nbytes == slot_nbytes
                    or refused.get(slab, -1) >= slab.changed
                ):
                    first = grain + 1  # no run over this grain: go on behind it
                    break
                tick = max(tick, slab.coldness())
            else:
                fits = self._run_nbytes(first, span) >= slot_nbytes
                if fits and (best_tick is None or tick < best_tick):
                    best_tick, best_first = tick, first
                first += 1
        owners = self._owners[best_first : best_first + span]
        slabs = list(dict.fromkeys(slab for slab in owners if slab is not None))
        return (best_tick, slabs) if best_tick is not None and slabs else None
