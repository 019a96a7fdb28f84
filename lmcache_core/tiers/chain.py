"""The ordered tiers: how a frame gets here, where it should be, and what leaves."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

from lmcache_core.errors import PoolFull
from lmcache_core.events import Event, StoreShed
from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import MemoryPool, PinTable
from lmcache_core.storage import Priority
from lmcache_core.tiers.flights import Flights, Ticket
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.layers import LayeredFrame, read_segments
from lmcache_core.tiers.memory_tier import MemoryTier
from lmcache_core.tiers.promotion import Promotion
from lmcache_core.tiers.requests import Deadlines, Marks, Policy, Run, Tier
from lmcache_core.tiers.storage_tier import GRACE_S, StorageTier


class TierChain:
    """All tiers of one process, nearest first, over one pool.

    Between tiers there is no invariant: a frame may be in any of them. No method raises for what a tier
    does. A request makes its `deadlines` once, and no tier costs it more than that.

    In a forked child it is closed from the start, without a lock that a thread of the parent may have held.
    """

    def __init__(
        self,
        pool: MemoryPool,
        pins: PinTable,
        emit: Callable[[Event], None],
        *,
        load_window_bytes: int,
        behind: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`behind` runs what it is given in order, on a thread where no Ctrl-C comes."""
        self.pool = pool
        self.pins = pins
        self.tiers: tuple[Tier, ...] = ()
        self.policies: dict[str, Policy] = {}
        self._closed = False
        self._pid = os.getpid()
        self._emit = emit
        self._window = load_window_bytes
        self._behind = behind
        self._on_close: list[Callable[[], None]] = []
        self._clock = clock
        self._flights = Flights()
        self._storing: dict[StorageKey, object] = {}  # by whom; each step on it is atomic by itself
        self._promotion = Promotion()

    def add(self, tier: Tier, policy: Policy) -> None:
        """Appends the next farther tier. Only while the chain is being built."""
        self.tiers = (*self.tiers, tier)
        self.policies[tier.name] = policy
        if isinstance(tier, MemoryTier):
            self.pool.attach(tier)

    @property
    def closed(self) -> bool:
        """Whether it has nothing and takes nothing any more."""
        return self._closed or os.getpid() != self._pid

    def on_close(self, action: Callable[[], None]) -> None:
        """Runs `action` once the tiers are closed."""
        self._on_close.append(action)

    # -- time ------------------------------------------------------------------------------------

    def now(self) -> float:
        """On the clock that deadlines are by."""
        return self._clock()

    def deadlines(self) -> Deadlines:
        """One request's time: each tier's deadline runs from when the request first needs it."""
        return Deadlines(self.policies, self._clock)

    # -- loading ---------------------------------------------------------------------------------

    def stream(
        self,
        keys: Sequence[StorageKey],
        runs: Sequence[Run],
        deadlines: Deadlines,
        priority: Priority = Priority.LOAD,
        among: Sequence[Tier] | None = None,
    ) -> Generator[tuple[Frame, str], None, None]:
        """Yields the frames of `runs` in order with the tier each came from; ends at the first that fails.

        The caller releases each frame. Reads run ahead by at most the load window. A frame that can't be
        had from its tier is tried in the farther ones of `among`. Closing the generator gives up the rest.
        """
        among = self.tiers if among is None else among
        steps = deque((run.tier, keys[i]) for run in runs for i in range(run.start, run.stop))
        pending: deque[tuple[Tier, StorageKey, Ticket[Frame] | None]] = deque()
        in_flight = 0
        marks = self.mark(keys[: runs[-1].stop] if runs else ())
        try:
            while steps or pending:
                while steps and (in_flight < self._window or not pending):
                    tier = steps[0][0]
                    if isinstance(tier, MemoryTier):
                        pending.append((*steps.popleft(), None))
                        continue
                    batch: list[StorageKey] = []
                    while steps and steps[0][0] is tier and (in_flight < self._window or not batch):
                        key = steps.popleft()[1]
                        copy = tier.index.get(key)
                        in_flight += copy.nbytes if copy is not None else 0
                        batch.append(key)
                    tickets = [Ticket[Frame](key) for key in batch]
                    pending.extend((tier, ticket.key, ticket) for ticket in tickets)
                    self.fetch(tier, tickets, priority, deadlines.of(tier), marks)
                tier, key, ticket = pending[0]
                if ticket is None:
                    frame = tier.borrow(key, "load") if isinstance(tier, MemoryTier) else None
                else:
                    frame = ticket.result(deadlines.of(tier) - self._clock() + GRACE_S)
                pending.popleft()
                if frame is None:
                    frame, tier = self._from_elsewhere(key, tier, among, priority, deadlines, marks)
                if frame is None:
                    return
                if ticket is not None:
                    in_flight -= frame.nbytes
                handed_over = self._clock()
                yield frame, tier.name
                deadlines.extend(self._clock() - handed_over)  # the caller's time is not the tiers'
        finally:
            for _, _, ticket in pending:
                if ticket is not None:
                    ticket.abandon()

    def fetch(
        self,
        tier: StorageTier,
        tickets: Sequence[Ticket[Frame]],
        priority: Priority,
        deadline: float,
        marks: Marks,
    ) -> None:
        """Starts reading frames for `tickets`, or joins reads of them that are under way."""

        def depart() -> None:
            tier.reads.queue.expire()  # a flight past its deadline is not worth joining
            mine = self._flights.join(tickets)
            try:
                if mine:
                    tier.reads.load(
                        mine,
                        priority,
                        deadline,
                        lambda key, frame, reason: self._arrived(tier, key, frame, reason, marks),
                    )
            except BaseException:  # whatever it was, others will want these keys
                for key in mine:
                    self._flights.land(key, None, "the load could not be started")
                raise

        self._behind(depart)

    def layered(self, tier: Tier, header: FrameHeader) -> LayeredFrame | None:
        """The frame that is like `header`, to be read a segment at a time; None where that can't be."""
        if not isinstance(tier, StorageTier) or not tier.capabilities.ranged:
            return None
        copy = tier.index.get(header.key)
        if copy is None or copy.nbytes != header.frame_nbytes:
            return None
        frame = LayeredFrame(tier, copy, header, self._clock)
        return frame if frame.least_range_nbytes >= tier.capabilities.range_min else None

    def read_layer(self, frames: Sequence[LayeredFrame], layer: int, deadlines: Deadlines) -> None:
        """Starts reading one segment of each frame. Each flies alone: what others read isn't shared."""
        for tier in {frame.tier: None for frame in frames}:
            here = [frame for frame in frames if frame.tier is tier]
            self._behind(partial(read_segments, tier, here, layer, deadlines.of(tier)))

    def _from_elsewhere(
        self,
        key: StorageKey,
        failed: Tier,
        among: Sequence[Tier],
        priority: Priority,
        deadlines: Deadlines,
        marks: Marks,
    ) -> tuple[Frame | None, Tier]:
        """A second chance in the tiers beyond the one that failed."""
        for tier in among[among.index(failed) + 1 :]:
            if not isinstance(tier, StorageTier) or not tier.contains(key):
                continue
            ticket = Ticket[Frame](key)
            try:
                self.fetch(tier, [ticket], priority, deadlines.of(tier), marks)
                frame = ticket.result(deadlines.of(tier) - self._clock() + GRACE_S)
            except BaseException:
                ticket.abandon()
                raise
            if frame is not None:
                return frame, tier
        return None, failed

    def _arrived(
        self, tier: StorageTier, key: StorageKey, frame: Frame | None, reason: str, marks: Marks
    ) -> None:
        try:
            if frame is not None and self._promotion.wanted(self.policies[tier.name], key):
                for nearer in self.tiers[: self.tiers.index(tier)]:
                    self._keep(nearer, frame, marks)
        finally:
            self._flights.land(key, frame, reason)
            if frame is not None:
                frame.release()

    # -- storing ---------------------------------------------------------------------------------

    def holds(self, key: StorageKey) -> bool:
        """Whether any tier has `key`, as far as is known without asking."""
        return any(tier.contains(key) for tier in self.tiers)

    def once(self, key: StorageKey, store: Callable[[], bool]) -> bool | None:
        """What `store()` returns; None, uncalled, when `key` is held already or another thread stores it.

        A copy in memory that a farther tier lacks is sent there.
        """
        for tier in self.tiers:
            if tier.contains(key):
                self._repair(tier, key)
                return None
        try:
            return store() if self._storing.setdefault(key, store) is store else None
        finally:
            if key in self._storing and self._storing[key] is store:  # no call here: no place for Ctrl-C
                del self._storing[key]

    def allocate(self, header: FrameHeader, deadline: float) -> Frame | None:
        """Memory for a new frame, its payload yet to be filled. None, and an event, when there is none."""
        try:
            lease = self.pool.allocate(header.frame_nbytes, owner="store", deadline=deadline)
        except PoolFull as error:
            self._emit(StoreShed(tier="", key=header.key, reason="no memory", detail=str(error)))
            return None
        return Frame(header, lease, sealed=False)

    def put(self, frame: Frame, marks: Marks) -> bool:
        """Keeps a filled frame in every tier that is written to. True when at least one took it.

        Nothing that was used after `marks` leaves for it: a request never evicts its own beginning.
        """
        taken = False
        for tier in self.tiers:
            taken = self._keep(tier, frame, marks) or taken
        return taken

    def mark(self, keys: Sequence[StorageKey]) -> Marks:
        """Begins a request: marks its path as used, and returns the moment before, for each tier."""
        marks = {tier.name: tier.index.mark() for tier in self.tiers}
        self.touch(keys)
        return marks

    @property
    def persistent_tiers(self) -> list[str]:
        """Names of the tiers whose contents outlive this process."""
        return [
            tier.name
            for tier in self.tiers
            if isinstance(tier, StorageTier) and (tier.capabilities.persistent or not tier.usable)
        ]

    @property
    def has_memory_tier(self) -> bool:
        return any(isinstance(tier, MemoryTier) for tier in self.tiers)

    def keep_in_memory(self, frame: Frame, marks: Marks) -> bool:
        """Makes sure that the memory tier holds `frame`. False when it can't."""
        for tier in self.tiers:
            if isinstance(tier, MemoryTier):
                return tier.contains(frame.key) or tier.store(frame, marks.get(tier.name))
        return False

    def reject(self, key: StorageKey, tier: str, reason: str) -> None:
        """A frame from `tier` is intact and yet not what its key promises here: it is no hit any more."""
        for each in self.tiers:
            if isinstance(each, MemoryTier):
                each.remove([key], "rejected")
            elif each.name == tier:
                each.reads.reject(key, reason)

    def touch(self, keys: Sequence[StorageKey]) -> None:
        """Marks a path from the root as used, in every tier."""
        if self.closed:
            return
        for tier in self.tiers:
            tier.index.touch(keys)

    def _keep(self, tier: Tier, frame: Frame, marks: Marks) -> bool:
        if not self.policies[tier.name].write or not tier.lacks(frame.key):
            return False
        since = marks.get(tier.name)
        return tier.store(frame, since) if isinstance(tier, MemoryTier) else tier.writes.offer(frame, since)

    def _repair(self, tier: Tier, key: StorageKey) -> None:
        if not isinstance(tier, MemoryTier):
            return
        lacking = [
            other
            for other in self.tiers
            if isinstance(other, StorageTier)
            and self.policies[other.name].write
            and other.usable
            and other.lacks(key)
        ]
        if lacking:
            frame = tier.borrow(key, "repair")
            if frame is not None:
                with frame:
                    for other in lacking:
                        other.writes.offer(frame)

    # -- the whole -------------------------------------------------------------------------------

    def remove(self, keys: Sequence[StorageKey], tiers: Sequence[Tier], reason: str) -> dict[str, int]:
        """Removes copies, at most a deadline a tier; leased and pinned ones stay. Counts by tier name.

        Writes of these keys that wait are given up, and those that run waited for: what they bring goes, too.
        """
        removed = dict.fromkeys((tier.name for tier in tiers), 0)
        wanted = frozenset(keys)
        for tier in self.tiers:
            if isinstance(tier, StorageTier):  # a write that runs holds the frame in memory, whoever asked
                until = self._clock() + self.policies[tier.name].deadline_s
                if tier in tiers:
                    for key in keys:
                        tier.writes.withdraw(key, reason)
                tier.writes.wait_for(wanted, until)
                if tier in tiers:
                    removed[tier.name] = tier.remove(keys, reason, until)
        for tier in tiers:
            if isinstance(tier, MemoryTier):
                removed[tier.name] = tier.remove(keys, reason)
        return removed

    def known(self, prefix: str, tiers: Sequence[Tier]) -> list[StorageKey]:
        """Keys of what these tiers hold, and of what is on its way there."""
        keys: dict[StorageKey, None] = {}
        for tier in tiers:
            keys |= dict.fromkeys(tier.index.keys(prefix))
            if isinstance(tier, StorageTier):
                keys |= dict.fromkeys(tier.writes.keys(prefix))
        return list(keys)

    def flush(self, deadline: float) -> bool:
        """Waits until no write waits or runs in any tier."""
        done = [tier.writes.flush(deadline) for tier in self.tiers if isinstance(tier, StorageTier)]
        return all(done)

    def close(self, deadline: float) -> None:
        """Writes what waits, as far as the deadline allows, then closes farthest first. Idempotent.

        In a forked child nothing happens: all of this is its parent's, whose locks may be held for ever.
        Raises only for Ctrl-C: then it has waited no longer, and closed everything all the same.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._close(deadline)
        except BaseException:
            self._close(self._clock())
            raise

    def _close(self, deadline: float) -> None:
        for tier in reversed(self.tiers):
            if isinstance(tier, StorageTier):
                tier.close(deadline)
            else:
                tier.close()
        for action in self._on_close:
            action()
        self.pool.close()
