"""A reclaimer of a pool such as a memory tier is, for tests of what leaves and what stays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_core.identity.keys import StorageKey, storage_key
from lmcache_core.memory import Hold, Lease, MemoryPool

KIB = 1024
SLAB = 64 * KIB


@dataclass
class Resident:
    hold: Hold
    parent: StorageKey | None
    tick: int
    children: set[StorageKey] = field(default_factory=set)


class Lru:
    """A reclaimer as a memory tier is one: least recently used first, children before parents."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.residents: OrderedDict[StorageKey, Resident] = OrderedDict()
        self.pinned: set[StorageKey] = set()
        self.tick = 0
        self.num_asked = 0
        self.num_evicted = 0
        self.on_ask: Callable[[], None] = lambda: None
        pool.attach(self)

    def coldest(self, slot_nbytes: int) -> int | None:
        self.num_asked += 1
        self.on_ask()
        with self.lock:
            key = self._candidate(slot_nbytes)
            return None if key is None else self.residents[key].tick

    def evict_coldest(self, slot_nbytes: int) -> bool:
        with self.lock:
            key = self._candidate(slot_nbytes)
            hold = self.residents[key].hold if key is not None else None
        return hold is not None and self.evict([hold]) > 0

    def evict(self, holds: Sequence[Hold]) -> int:
        with self.lock:
            family = self._family([hold.tag for hold in holds if hold.tag in self.residents])
            if any(self._stays(key) for key in family):
                return 0
            taken = [self._take(key) for key in reversed(family)]
        self.num_evicted += len(taken)
        return sum(resident.hold.evict() for resident in taken)

    def store(self, name: str, nbytes: int, parent: str | None = None, deadline: float = 0.0) -> StorageKey:
        key = storage_key(name)
        with self.pool.allocate(nbytes, owner="store", deadline=deadline) as lease:
            lease.memory[:] = name.encode().ljust(nbytes, b".")[:nbytes]
            self.admit(key, lease, parent)
        return key

    def admit(self, key: StorageKey, lease: Lease, parent: str | None = None) -> Hold:
        hold = lease.hold(key)
        with self.lock:
            above = storage_key(parent) if parent is not None else None
            if above is not None and above in self.residents:
                self.residents[above].children.add(key)
            self.residents[key] = Resident(hold, above, 0)
            self._use(key)
        return hold

    def read(self, name: str) -> bytes | None:
        key = storage_key(name)
        with self.lock:
            resident = self.residents.get(key)
            if resident is not None:
                self._use(key)
        lease = resident.hold.lease("reader") if resident is not None else None
        if lease is None:
            return None
        with lease:
            return bytes(lease.memory[: len(name)])

    def _use(self, key: StorageKey) -> None:
        self.tick += 1
        self.residents[key].tick = self.tick
        self.residents[key].hold.touch(self.tick)
        self.residents.move_to_end(key)

    def _stays(self, key: StorageKey) -> bool:
        return key in self.pinned or self.residents[key].hold.leased

    def _candidate(self, slot_nbytes: int) -> StorageKey | None:
        for key, resident in self.residents.items():
            if resident.hold.slot_nbytes == slot_nbytes and not any(map(self._stays, self._family([key]))):
                return key
        return None

    def _family(self, keys: list[StorageKey]) -> list[StorageKey]:
        """With all that depends on them, parents first."""
        family = list(dict.fromkeys(keys))
        for key in family:  # grows while it is walked
            family += [child for child in self.residents[key].children if child not in family]
        return family

    def _take(self, key: StorageKey) -> Resident:
        resident = self.residents.pop(key)
        if resident.parent is not None and resident.parent in self.residents:
            self.residents[resident.parent].children.discard(key)
        return resident


def pool_of(num_slabs: int, **options: object) -> MemoryPool:
    return MemoryPool(num_slabs * SLAB, slab_nbytes=SLAB, **options)
