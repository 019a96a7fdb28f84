"""The pool against an oracle that knows nothing of slabs: who refers to what, and which bytes it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from lmcache_core.errors import LeaseError, PoolFull
from lmcache_core.identity.keys import storage_key
from lmcache_core.memory import Hold, Lease, MemoryPool

PAGE = 4096
PAGES = st.one_of(st.integers(1, 40), st.sampled_from([3, 5, 7, 8, 16, 17, 33]))
SIZES = PAGES.map(lambda pages: pages * PAGE)


@dataclass(eq=False)
class Block:
    """What the oracle knows of one allocation."""

    number: int
    offset: int
    nbytes: int
    slot_nbytes: int
    leases: int = 1
    views: int = 0
    """Quarantined leases: released, but with a slice of their memory alive."""
    residents: list[Hold] = field(default_factory=list)
    waiting: list[Hold] = field(default_factory=list)

    @property
    def accessed(self) -> bool:
        return self.leases + self.views > 0

    @property
    def alive(self) -> bool:
        return self.accessed or bool(self.residents) or bool(self.waiting)

    def stamp(self) -> bytes:
        return self.number.to_bytes(8, "little")


class PoolMachine(RuleBasedStateMachine):
    """Every rule changes pool and oracle alike; the invariants compare them."""

    leases = Bundle("leases")
    views = Bundle("views")
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.block_of: dict[Hold, Block] = {}
        self.pinned: set[Hold] = set()
        self.num_lost = 0
        self.num_blocks = 0
        self.tick = 0

    @initialize(
        pages=st.integers(8, 80),
        slab_pages=st.integers(1, 24),
        reserved_pages=st.integers(0, 7),
        debug=st.booleans(),
    )
    def open(self, pages: int, slab_pages: int, reserved_pages: int, debug: bool) -> None:
        self.pool = MemoryPool(
            pages * PAGE,
            reserved_bytes=reserved_pages * PAGE,
            slab_nbytes=slab_pages * PAGE,
            huge_pages=False,
            debug=debug,
            clock=lambda: 0.0,
        )
        self.pool.attach(self)

    # -- the reclaimer: any order will do, what is pinned stays ------------------------------------

    def evictable(self, slot_nbytes: int) -> list[Hold]:
        return [
            hold
            for block in self.blocks
            for hold in block.residents
            if block.slot_nbytes == slot_nbytes and not block.accessed and hold not in self.pinned
        ]

    def coldest(self, slot_nbytes: int) -> int | None:
        return min((hold.tick for hold in self.evictable(slot_nbytes)), default=None)

    def evict_coldest(self, slot_nbytes: int) -> bool:
        holds = sorted(self.evictable(slot_nbytes), key=lambda hold: hold.tick)
        return bool(holds) and self.evict(holds[:1]) >= 0

    def evict(self, holds: Sequence[Hold]) -> int:
        if any(hold in self.pinned for hold in holds):
            return 0
        count = 0
        for hold in holds:
            block = self.block_of[hold]
            assert hold.evict() is not block.accessed
            if not block.accessed:
                block.residents.remove(hold)
                count += not block.residents
        return count

    def told(self, hold: Hold) -> None:
        """A waiting write was shed: only of a block without lease, and only once."""
        block = self.block_of[hold]
        assert not block.accessed
        assert hold.lease("shed") is None
        block.waiting.remove(hold)

    # -- rules -------------------------------------------------------------------------------------

    @rule(target=leases, nbytes=SIZES, reserve=st.booleans(), odd=st.integers(0, PAGE - 1))
    def try_allocate(self, nbytes: int, reserve: bool, odd: int) -> object:
        return self._took(self.pool.try_allocate(nbytes - odd, owner="machine", reserve=reserve), reserve)

    @rule(target=leases, nbytes=SIZES, reserve=st.booleans(), odd=st.integers(0, PAGE - 1))
    def allocate(self, nbytes: int, reserve: bool, odd: int) -> object:
        try:
            lease = self.pool.allocate(nbytes - odd, owner="machine", deadline=0.0, reserve=reserve)
        except PoolFull:
            self._check_refusal(nbytes, reserve)
            return multiple()
        return self._took(lease, reserve)

    @rule(target=leases, lease=leases)
    def share(self, lease: Lease) -> object:
        if lease.released:
            with pytest.raises(LeaseError):
                lease.share("machine")
            return multiple()
        self._block(lease).leases += 1
        return lease.share("machine")

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        if lease.released:
            with pytest.raises(LeaseError):
                lease.release()
            return
        self._block(lease).leases -= 1
        lease.release()

    @rule(target=views, lease=leases)
    def release_while_viewed(self, lease: Lease) -> object:
        if lease.released:
            return multiple()
        block = self._block(lease)
        view = lease.memory[:8]
        block.leases -= 1
        block.views += 1
        lease.release()
        return view, block

    @rule(view=consumes(views))
    def end_view(self, view: tuple[memoryview, Block]) -> None:
        memory, block = view
        assert bytes(memory) == block.stamp()[: len(memory)]
        memory.release()
        block.views -= 1

    @rule(nbytes=SIZES)
    def lose_a_lease(self, nbytes: int) -> None:
        lease = self.pool.try_allocate(nbytes, owner="forgetful")
        self.num_lost += lease is not None
        del lease

    @rule(target=holds, lease=leases, resident=st.booleans(), touch=st.booleans())
    def hold(self, lease: Lease, resident: bool, touch: bool) -> object:
        if lease.released:
            with pytest.raises(LeaseError):
                lease.hold()
            return multiple()
        block = self._block(lease)
        hold = lease.hold(storage_key("c-1"), None if resident else self.told)
        (block.residents if resident else block.waiting).append(hold)
        self.block_of[hold] = block
        if touch:
            self.touch(hold)
        return hold

    @rule(target=holds, nbytes=SIZES, resident=st.booleans())
    def store(self, nbytes: int, resident: bool) -> object:
        """What a store does: a fresh frame that is only held afterwards."""
        try:
            lease = self.pool.allocate(nbytes, owner="machine", deadline=0.0)
        except PoolFull:
            self._check_refusal(nbytes, reserve=False)
            return multiple()
        self._took(lease, reserve=False)
        hold = self.hold(lease, resident, True)
        self.release(lease)
        return hold

    @rule(hold=holds)
    def touch(self, hold: Hold) -> None:
        self.tick += 1
        hold.touch(self.tick)

    @rule(target=leases, hold=holds)
    def lease_again(self, hold: Hold) -> object:
        lease = hold.lease("machine")
        if not self._holds(hold):
            assert lease is None
            return multiple()
        assert lease is not None
        self.block_of[hold].leases += 1
        return lease

    @rule(hold=holds)
    def drop(self, hold: Hold) -> None:
        if self._holds(hold):
            block = self.block_of[hold]
            (block.residents if hold in block.residents else block.waiting).remove(hold)
            self.pinned.discard(hold)
        hold.drop()

    @rule(hold=holds)
    def evict_one(self, hold: Hold) -> None:
        if hold.resident and self._holds(hold) and hold not in self.pinned:
            self.evict([hold])

    @rule(hold=holds)
    def pin(self, hold: Hold) -> None:
        if hold.resident and self._holds(hold):
            self.pinned.add(hold)

    @rule()
    def unpin(self) -> None:
        self.pinned.clear()
        self.pool.wake()

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def the_pool_agrees_with_itself(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()

    @invariant()
    def no_two_blocks_share_a_byte_and_each_keeps_its_own(self) -> None:
        self.blocks = [block for block in self.blocks if block.alive]
        end = 0
        for block in sorted(self.blocks, key=lambda block: block.offset):
            assert block.offset >= end
            end = block.offset + block.slot_nbytes
            stamp = block.stamp()[: block.nbytes]
            assert self.pool.buffer[block.offset : block.offset + len(stamp)] == stamp
        assert end <= self.pool.capacity_bytes if self.blocks else end == 0

    @invariant()
    def the_numbers_are_the_oracles(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        blocks = self.blocks
        assert stats.leases == sum(block.leases for block in blocks)
        assert stats.holds == sum(len(block.residents) + len(block.waiting) for block in blocks)
        assert stats.used_bytes == sum(block.slot_nbytes for block in blocks)
        assert stats.leased_bytes == self._leased_bytes()
        assert stats.held_bytes == sum(b.slot_nbytes for b in blocks if b.residents or b.waiting)
        assert stats.quarantined_bytes == sum(block.slot_nbytes * block.views for block in blocks)
        assert stats.lost_leases == self.num_lost

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()

    # -- inside ------------------------------------------------------------------------------------

    def _took(self, lease: Lease | None, reserve: bool) -> object:
        if lease is None:
            return multiple()
        self.blocks = [block for block in self.blocks if block.alive]
        self.num_blocks += 1
        block = Block(self.num_blocks, lease.offset, lease.nbytes, lease.slot_nbytes)
        assert lease.nbytes <= lease.slot_nbytes
        lease.memory[:8] = block.stamp()[: min(8, lease.nbytes)]
        self.blocks.append(block)
        leased_bytes = self._leased_bytes()
        assert reserve or leased_bytes <= self.pool.capacity_bytes - self.pool.reserved_bytes
        return lease

    def _check_refusal(self, nbytes: int, reserve: bool) -> None:
        """Refused only where no eviction that is allowed could have made room."""
        self.blocks = [block for block in self.blocks if block.alive]
        limit = self.pool.capacity_bytes - (0 if reserve else self.pool.reserved_bytes)
        if self._leased_bytes() + nbytes > limit:
            return
        stays = [b for b in self.blocks if b.accessed or any(hold in self.pinned for hold in b.residents)]
        assert stays, "everything could be evicted, and yet it was refused"
        room = limit - self._leased_bytes()
        goes = [b for b in self.blocks if b not in stays and nbytes <= b.slot_nbytes <= room]
        assert not goes, "a slot large enough could be evicted, and yet it was refused"

    def _leased_bytes(self) -> int:
        return sum(block.slot_nbytes for block in self.blocks if block.accessed)

    def _block(self, lease: Lease) -> Block:
        (block,) = [block for block in self.blocks if block.alive and block.offset == lease.offset]
        return block

    def _holds(self, hold: Hold) -> bool:
        block = self.block_of[hold]
        return hold in block.residents or hold in block.waiting


PoolMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_the_pool_behaves_like_its_oracle = PoolMachine.TestCase
