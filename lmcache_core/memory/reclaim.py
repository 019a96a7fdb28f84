"""Making room: which frame or slab leaves when a class has no free slot."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Protocol

from lmcache_core.memory.lease import Hold, tell_evicted
from lmcache_core.memory.ledger import Claim, Ledger
from lmcache_core.memory.slab_table import Refused
from lmcache_core.memory.slabs import Slab, Slot

MAX_PARTIAL_DRAINS = 4
"""Slabs that one allocation may evict from without emptying them, before it tries no more."""

MAX_USELESS_EVICTIONS = 16
"""Evictions that free nothing, before one allocation asks for no more of them."""

MAX_FAMILIES = 64
"""Frames with dependents that one last resort may ask the reclaimer for in vain."""

MAX_ATTEMPTS_WHEN_LATE = 64
"""An allocation past its deadline still evicts this often for a slot that other threads snatch away."""


class Reclaimer(Protocol):
    """Decides which resident frames leave: the tier layer. Called without a pool lock, on the thread
    that allocates; may not allocate from the pool. Frames leave through `Hold.evict` (or `drop`).
    """

    def coldest(self, slot_nbytes: int) -> int | None:
        """The tick of the frame that `evict_coldest` would evict, or None when there is none."""

    def evict_coldest(self, slot_nbytes: int) -> bool:
        """Evicts the coldest resident with this `slot_nbytes` that may go, and what depends on it.

        Dependents count, not only frames without any: a chunk's last descendant is often a tail, which
        has another slot size. False: nothing may go.
        """

    def evict(self, holds: Sequence[Hold]) -> int:
        """Evicts all these residents and what depends on them; returns how many slots came free.

        When one of them has to stay (pinned, leased, or an ancestor of one that is), evicts none:
        the slab they share would not come free, and the others would be lost for nothing.
        """


class Reclaim:
    """One allocation's search for room. Remembers what could not be evicted, so that it ends."""

    def __init__(
        self, ledger: Ledger, reclaimer: Reclaimer | None, nbytes: int, claim: Claim, *, reserve: bool
    ) -> None:
        self.seen = -1
        """The ledger's generation when `step` last found nothing to do: wait until it changes."""
        self.saw_drain = False
        """`step` left off because another thread was emptying slabs."""
        self._ledger = ledger
        self._reclaimer = reclaimer
        self._nbytes = nbytes
        self._claim = claim
        self._reserve = reserve
        self._refused: Refused = {}
        self._partial_drains = 0
        self._useless_evictions = 0
        self._exhausted_at = -1  # the generation at which no resident of the class could be evicted
        self._families_refused_at = -1
        self._num_wakes = ledger.num_wakes

    def restart(self) -> None:
        """What could not be evicted may be tried again: a pin can have expired, which nobody announces."""
        self._refused.clear()
        self._exhausted_at = -1
        self._families_refused_at = -1

    def step(self, *, expired: Callable[[], bool]) -> bool:
        """Evicts the coldest things until a slot comes of it, which is then in the claim, leased.

        Candidates: the coldest resident of the class, its oldest slot that only waiting writes hold,
        and the coldest slabs of other classes. Blocks only as long as the reclaimer and `on_evict` do.
        """
        ledger = self._ledger
        for attempt in itertools.count():
            with ledger.collecting, ledger.lock:
                ledger.settle()
                self.seen = ledger.generation
                slot_nbytes = ledger.slot_nbytes(self._nbytes, self._reserve)
                if ledger.take(slot_nbytes, self._reserve, self._claim):
                    return True
                if ledger.closed or slot_nbytes > ledger.room(self._reserve):
                    return False  # eviction can't help: what is leased has to be released
            if attempt >= MAX_ATTEMPTS_WHEN_LATE and expired():
                return False
            ways = self._ways(slot_nbytes)
            if not ways:
                if self._evict_family(slot_nbytes):
                    continue
                break
            _, make_room = min(ways, key=operator.itemgetter(0))
            make_room()
            if self._claim:
                return True
        self.saw_drain = ledger.draining and not expired()
        if self.saw_drain:
            return False  # another thread is about to free slabs: better than wasting a larger slot
        return self._take_larger(slot_nbytes)

    def _ways(self, slot_nbytes: int) -> list[tuple[int, Callable[[], None]]]:
        """Ways to make room, each with the latest tick that it would evict."""
        ledger = self._ledger
        ways: list[tuple[int, Callable[[], None]]] = []
        generation = ledger.generation
        if self._reclaimer is not None and self._exhausted_at != generation:
            tick = self._reclaimer.coldest(slot_nbytes)
            if tick is None:
                self._exhausted_at = generation
            else:
                ways.append((tick, lambda: self._evict_resident(slot_nbytes)))
        with ledger.collecting, ledger.lock:
            ledger.settle()
            if self._num_wakes != ledger.num_wakes:
                self._num_wakes = ledger.num_wakes
                self.restart()
            orphan = self._oldest_orphan(slot_nbytes)
            if orphan is not None:
                tick = max((hold.tick for hold in orphan.live_holds()), default=0)
                ways.append((tick, lambda: self._evict_orphan(slot_nbytes)))
            run = None
            if not ledger.draining and self._partial_drains < MAX_PARTIAL_DRAINS:
                run = ledger.table.coldest_run(slot_nbytes, self._refused)
        if run is not None:
            tick, slabs = run
            ways.append((tick, lambda: self._drain(slabs, slot_nbytes)))
        return ways

    def _evict_resident(self, slot_nbytes: int) -> None:
        assert self._reclaimer is not None
        before = self._ledger.generation
        if not self._reclaimer.evict_coldest(slot_nbytes):
            self._exhausted_at = before
        elif self._ledger.generation == before:  # what it evicted was leased meanwhile: nothing came free
            self._useless_evictions += 1
            if self._useless_evictions >= MAX_USELESS_EVICTIONS:
                self._exhausted_at = before

    def _evict_family(self, slot_nbytes: int) -> bool:
        """Asks for the frames of the class by name, coldest slab first, where `evict_coldest` has none."""
        ledger = self._ledger
        if self._reclaimer is None or self._families_refused_at == ledger.generation:
            return False
        with ledger.collecting, ledger.lock:
            ledger.settle()
            frames = ledger.table.coldest_residents(slot_nbytes, MAX_FAMILIES)
        for hold in frames:
            before = ledger.generation
            if self._reclaimer.evict([hold]) and ledger.generation != before:
                return True
        self._families_refused_at = ledger.generation
        return False

    def _oldest_orphan(self, slot_nbytes: int) -> Slot | None:
        size_class = self._ledger.table.classes.get(slot_nbytes)
        return next(iter(size_class.orphans), None) if size_class is not None else None

    def _evict_orphan(self, slot_nbytes: int) -> None:
        ended: list[Hold] = []
        try:
            with self._ledger.collecting, self._ledger.lock:
                self._ledger.settle()
                orphan = self._oldest_orphan(slot_nbytes)
                if orphan is not None:
                    _end_waiting(orphan, ended)
        finally:
            tell_evicted(ended)

    def _drain(self, slabs: Sequence[Slab], slot_nbytes: int) -> None:
        """Empties `slabs` and takes a slot in their place before anyone else can."""
        ledger = self._ledger
        residents: list[Hold] = []
        num_frames = 0
        started = False
        try:
            with ledger.collecting, ledger.lock:
                ledger.settle()
                if ledger.draining or any(not slab.used or slab.num_leased for slab in slabs):
                    ledger.table.mend(slabs)
                    return  # somebody was here first: look again
                started = ledger.draining = True
                for slab in slabs:
                    ledger.table.start_drain(slab)
                num_frames = sum(len(slab.used) for slab in slabs)
                slots = [slot for slab in slabs for slot in slab.used]
                residents += [hold for slot in slots for hold in slot.live_holds() if hold.resident]
            if residents and self._reclaimer is not None:
                self._reclaimer.evict(residents)
        finally:
            if started:
                try:
                    self._end_drain(slabs, slot_nbytes, num_frames)
                except BaseException:
                    if ledger.draining:  # Ctrl-C came before its end: nobody could drain any more
                        self._end_drain(slabs, slot_nbytes, num_frames)
                    raise

    def _end_drain(self, slabs: Sequence[Slab], slot_nbytes: int, num_frames: int) -> None:
        ledger = self._ledger
        ended: list[Hold] = []
        try:
            with ledger.lock:
                ledger.settle()
                left = [slot for slab in slabs for slot in slab.used]
                if not any(slot.leases or slot.residents for slot in left):
                    for slot in left:
                        _end_waiting(slot, ended)
                    left = []
                for slab in slabs:
                    ledger.table.end_drain(slab)
                ledger.draining = False
                if len(left) < num_frames:
                    ledger.wake()
                else:
                    ledger.stir()
                if left:
                    self._refused.update(dict.fromkeys(slabs, ledger.generation))
                    self._partial_drains += len(left) < num_frames
                else:
                    ledger.num_drained_slabs += len(slabs)
                    ledger.take(slot_nbytes, self._reserve, self._claim)
        finally:
            if ledger.notes:
                ledger.collect()
            tell_evicted(ended)

    def _take_larger(self, slot_nbytes: int) -> bool:
        """The last resort, where leases keep every slab from leaving: a slot of a larger class."""
        ledger = self._ledger
        with ledger.collecting, ledger.lock:
            ledger.settle()
            taken = ledger.take(slot_nbytes, self._reserve, self._claim, larger=True)
            sizes = ledger.table.larger_sizes(slot_nbytes, ledger.room(self._reserve))
        for size in () if taken else sizes:
            self._evict_orphan(size)
            for _ in range(MAX_USELESS_EVICTIONS):  # a frame may have several residents: all have to go
                with ledger.collecting, ledger.lock:
                    ledger.settle()
                    if ledger.take(slot_nbytes, self._reserve, self._claim, larger=True):
                        return True
                if self._reclaimer is None or not self._reclaimer.evict_coldest(size):
                    break
        return taken


def _end_waiting(slot: Slot, ended: list[Hold]) -> None:
    """Ends the waiting writes of an unleased slot without residents, and lists them. Needs the lock."""
    waiting = slot.live_holds()
    ended += waiting
    for hold in waiting:
        hold.end()
