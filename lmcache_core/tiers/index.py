"""What one tier holds: keys, bytes, family, recency, and who must leave when room is needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_core.events import EventBus
from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold
from lmcache_core.tiers.stream import ResidencyStream


class Resident:
    """One copy of one frame in one tier. Owned by its index; fields change only under its lock."""

    __slots__ = ("children", "header", "hold", "key", "last_use", "nbytes", "parent", "stored", "token")

    def __init__(
        self,
        key: StorageKey,
        nbytes: int,
        stored: int,
        *,
        parent: StorageKey | None = None,
        token: int | None = None,
        hold: Hold | None = None,
        header: FrameHeader | None = None,
    ) -> None:
        self.key = key
        self.nbytes = nbytes  # the frame's length
        self.stored = stored  # what the tier charges for it
        self.parent = parent
        self.token = token
        self.hold = hold  # memory tiers: the pool's evictable reference
        self.header = header  # memory tiers: kept here, since unsealed frames carry none
        self.children = 0
        self.last_use = 0

    @property
    def order_class(self) -> int:
        return self.stored if self.hold is None else self.hold.slot_nbytes


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Gauges of one tier's index. `reserved_bytes` belongs to puts under way and evictions not yet done."""

    entries: int
    used_bytes: int
    reserved_bytes: int
    capacity_bytes: int | None
    sequence: int
    """Of the last admit or evict."""
    evicted: Mapping[str, int]
    """Copies that left since the start, by reason."""

    @property
    def admitted(self) -> int:
        """Copies that came since the start."""
        return self.sequence - sum(self.evicted.values())


class ResidencyIndex:
    """Exact for a tier that this process evicts; what the tier was last known to hold otherwise.

    Invariant (under `_lock`): used + reserved <= capacity, where used is the sum of `stored` over
    visible entries, and reserved covers puts under way and copies chosen for eviction but not yet gone.
    A parent with resident children, a pinned key or a leased frame is never chosen. Recency is kept per
    size class; a touch goes deepest first, so ancestors are newer than what hangs on them.
    """

    def __init__(
        self,
        tier: str,
        capacity_bytes: int | None,
        *,
        pinned: Callable[[StorageKey], bool],
        events: EventBus,
    ) -> None:
        self.tier = tier
        self._capacity = capacity_bytes
        self._pinned = pinned
        self._stream = ResidencyStream(tier, events)
        self._lock = threading.Lock()
        self._entries: dict[StorageKey, Resident] = {}
        self._orders: dict[int, OrderedDict[StorageKey, Resident]] = {}
        self._children: dict[StorageKey, set[StorageKey]] = {}  # also of parents that aren't here
        self._tick = 0
        self._used = 0
        self._reserved = 0
        self._leaving = 0  # the part of _reserved that chosen victims still occupy
        self._writing = 0  # the part of _reserved that puts under way occupy, wholly or in part

    # -- reading ---------------------------------------------------------------------------------

    def __contains__(self, key: StorageKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: StorageKey) -> Resident | None:
        return self._entries.get(key)

    def prefix_length(self, keys: Sequence[StorageKey], start: int = 0) -> int:
        """How many of `keys` from `start` on are here without a gap."""
        entries = self._entries
        position = start
        for position in range(start, len(keys)):
            if keys[position] not in entries:
                return position - start
        return max(len(keys) - start, 0)

    def keys(self, prefix: str = "") -> list[StorageKey]:
        with self._lock:
            return [key for key in self._entries if key.startswith(prefix)]

    def stats(self) -> IndexStats:
        with self._lock:
            return IndexStats(
                len(self._entries),
                self._used,
                self._reserved,
                self._capacity,
                self._stream.sequence,
                self._stream.evictions,
            )

    # -- admission -------------------------------------------------------------------------------

    def mark(self) -> int:
        """A moment, for `since`."""
        return self._tick

    def reserve(self, nbytes: int, since: int | None = None) -> list[Resident] | None:
        """Sets `nbytes` aside for a put, choosing victims where needed; none used after `since`.

        Returns the victims, hidden: no longer visible, their bytes counted until `gone` is told of each.
        The reservation counts at once, so the caller must see victims gone before it writes. None: no
        room can be made (larger than the tier, or the rest is pinned, leased or has children here).
        """
        with self._lock:
            victims = self._choose(nbytes, since)
            if victims is None:
                return None
            self._reserved += nbytes
        self._stream.flush()
        return victims

    def take_room(self, nbytes: int, since: int | None = None) -> list[Resident] | None:
        """`reserve` and `begin` in one, for a medium that gives up a copy the moment it is told to.

        The victims are gone for good: their bytes don't count any more.
        """
        with self._lock:
            victims = self._choose(nbytes, since)
            if victims is None:
                return None
            for victim in victims:
                self._leave(victim)
            self._reserved += nbytes
            self._writing += nbytes
        self._stream.flush()
        return victims

    def begin(self, nbytes: int) -> bool:
        """Whether a reserved put of `nbytes` may write now: the medium has the room, victims being gone.

        True once; the bytes then count as written until `admit` or `unreserve`.
        """
        with self._lock:
            occupied = self._used + self._leaving + self._writing
            if self._capacity is not None and occupied + nbytes > self._capacity:
                return False
            self._writing += nbytes
            return True

    @property
    def unsettled(self) -> bool:
        """Whether bytes are on their way: victims leaving, or puts writing."""
        return self._leaving > 0 or self._writing > 0

    def unreserve(self, nbytes: int, *, begun: bool) -> None:
        """Gives up a reservation, for a put that will not, or did not, take place."""
        with self._lock:
            self._reserved -= nbytes
            if begun:
                self._writing -= nbytes

    def gone(self, victim: Resident) -> None:
        """The bytes of a hidden copy have left the medium."""
        with self._lock:
            self._leave(victim)

    def kept(self, victim: Resident) -> None:
        """A hidden copy could not be removed from the medium: it is visible again, and the newest."""
        with self._lock:
            if victim.key in self._entries:  # a newer copy took its place; the old bytes are gone with it
                self._leave(victim)
            else:
                self._leave(victim)
                self._insert(victim)  # as the newest: another victim is tried next time
                self._stream.admitted(victim.key, victim.stored)
        self._stream.flush()

    def admit(self, entry: Resident, *, reserved: int = 0) -> Resident | None:
        """Makes `entry` visible, its `reserved` bytes, begun, being used now. Returns the copy it replaces.

        An older copy (smaller token) never replaces a newer one; then `entry` itself is returned.
        """
        with self._lock:
            self._reserved -= reserved
            self._writing -= reserved
            old = self._entries.get(entry.key)
            if old is not None:
                if old.token is not None and entry.token is not None and entry.token < old.token:
                    return entry
                self._forget(old)
                self._stream.evicted(old.key, old.stored, "replaced")
            self._insert(entry)
            self._stream.admitted(entry.key, entry.stored)
        self._stream.flush()
        return old

    def load(self, entries: Iterable[Resident]) -> None:
        """Fills an empty index from what a tier kept, oldest first, ancestors made newer than descendants."""
        rows = list(entries)
        position = {entry.key: i for i, entry in enumerate(rows)}
        rank = list(range(len(rows)))
        for i in range(len(rows) - 1, -1, -1):
            parent = rows[i].parent
            above = position.get(parent) if parent is not None else None
            if above is not None and above < i:
                rank[above] = max(rank[above], rank[i])
        with self._lock:
            for i in sorted(range(len(rows)), key=lambda i: (rank[i], -i)):
                entry = rows[i]
                old = self._entries.get(entry.key)
                if old is not None:
                    self._forget(old)
                self._insert(entry)
                self._stream.admitted(entry.key, entry.stored)
        self._stream.flush()

    # -- use and removal -------------------------------------------------------------------------

    def touch(self, keys: Sequence[StorageKey]) -> None:
        """Marks a path from the root as used: the deepest first, so that its ancestors are newer."""
        with self._lock:
            for key in reversed(keys):
                entry = self._entries.get(key)
                if entry is not None:
                    self._use(entry)

    def remove(self, key: StorageKey, reason: str, *, token: int | None = None) -> Resident | None:
        """Forgets a copy that is gone. With `token`, only that copy or an older one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if token is not None and entry.token is not None and entry.token > token:
                return None
            self._forget(entry)
            self._stream.evicted(entry.key, entry.stored, reason)
        self._stream.flush()
        return entry

    def forget_all(self, reason: str) -> None:
        for key in self.keys():
            self.remove(key, reason)

    def take(self, keys: Iterable[StorageKey], reason: str) -> list[Resident]:
        """Hides these copies ahead of their removal, like victims; pinned and leased ones stay."""
        taken = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and not self._held(entry):
                    self._take(entry, reason)
                    taken.append(entry)
        self._stream.flush()
        return taken

    def take_families(self, keys: Sequence[StorageKey]) -> list[Resident]:
        """Hides these copies with everything that hangs on them here, deepest first; or, where one of
        all these must stay, none."""
        with self._lock:
            family = self._family(keys)
            if any(self._held(entry) for entry in family):
                return []
            for entry in family:
                self._take(entry, "capacity")
        self._stream.flush()
        return family

    def take_copy(self, copy: Resident, reason: str) -> bool:
        """Hides exactly this copy, pinned or not; False when it is no longer the one that is here."""
        with self._lock:
            here = self._entries.get(copy.key) is copy
            if here:
                self._take(copy, reason)
        self._stream.flush()
        return here

    def take_coldest(self, order_class: int) -> list[Resident]:
        """Hides the coldest copy of a size class that can leave with its family, and that family, deepest
        first. (Its leaf is often of another class: a tail.) Empty: none can."""
        with self._lock:
            family = self._coldest_family(order_class)
            for entry in family:
                self._take(entry, "capacity")
        self._stream.flush()
        return family

    def coldest_use(self, order_class: int) -> int | None:
        """When the copy was last used that `take_coldest` would choose."""
        with self._lock:
            family = self._coldest_family(order_class)
            return family[-1].last_use if family else None

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the bound; what is above it leaves with the next reservations."""
        with self._lock:
            self._capacity = capacity_bytes

    # -- under the lock --------------------------------------------------------------------------

    def _held(self, entry: Resident) -> bool:
        return (entry.hold is not None and entry.hold.leased) or self._pinned(entry.key)

    def _choose(self, nbytes: int, since: int | None) -> list[Resident] | None:
        """Hides what must leave for `nbytes` more; None, and nothing hidden, when that isn't enough."""
        victims: list[Resident] = []
        if self._capacity is None:
            return victims
        wanted = self._used + self._reserved - self._leaving + nbytes - self._capacity
        while wanted > 0:
            victim = self._coldest()
            if victim is None or (since is not None and victim.last_use > since):
                for entry in reversed(victims):
                    self._restore(entry)
                return None
            self._hide(victim)
            victims.append(victim)
            wanted -= victim.stored
        for victim in victims:
            self._stream.evicted(victim.key, victim.stored, "capacity")
        return victims

    def _coldest(self) -> Resident | None:
        """The coldest copy that has no children here and may leave."""
        coldest: Resident | None = None
        for order in self._orders.values():
            for entry in order.values():
                if coldest is not None and entry.last_use >= coldest.last_use:
                    break
                if entry.children == 0 and not self._held(entry):
                    coldest = entry
                    break
        return coldest

    def _coldest_family(self, order_class: int) -> list[Resident]:
        for entry in self._orders.get(order_class, {}).values():
            family = self._family([entry.key])
            if not any(self._held(member) for member in family):
                return family
        return []

    def _family(self, keys: Sequence[StorageKey]) -> list[Resident]:
        """These copies and everything that hangs on them here, deepest first."""
        path = list(dict.fromkeys(keys))
        seen = set(path)
        for above in path:  # grows while it is walked: breadth first
            below = [key for key in self._children.get(above, ()) if key not in seen]
            seen.update(below)
            path.extend(below)
        return [entry for key in reversed(path) if (entry := self._entries.get(key)) is not None]

    def _use(self, entry: Resident) -> None:
        self._tick += 1
        entry.last_use = self._tick
        self._orders[entry.order_class].move_to_end(entry.key)
        if entry.hold is not None:
            entry.hold.touch(self._tick)

    def _insert(self, entry: Resident) -> None:
        entry.children = len(self._children.get(entry.key, ()))
        self._entries[entry.key] = entry
        self._orders.setdefault(entry.order_class, OrderedDict())[entry.key] = entry
        self._used += entry.stored
        if entry.parent is not None:
            siblings = self._children.setdefault(entry.parent, set())
            siblings.add(entry.key)
            parent = self._entries.get(entry.parent)
            if parent is not None:
                parent.children = len(siblings)
        self._use(entry)

    def _forget(self, entry: Resident) -> None:
        del self._entries[entry.key]
        order = self._orders[entry.order_class]
        del order[entry.key]
        if not order:
            del self._orders[entry.order_class]
        self._used -= entry.stored
        if entry.parent is not None:
            siblings = self._children[entry.parent]
            siblings.discard(entry.key)
            parent = self._entries.get(entry.parent)
            if parent is not None:
                parent.children = len(siblings)
            if not siblings:
                del self._children[entry.parent]

    def _take(self, entry: Resident, reason: str) -> None:
        self._hide(entry)
        self._stream.evicted(entry.key, entry.stored, reason)

    def _hide(self, entry: Resident) -> None:
        self._forget(entry)
        self._leaving += entry.stored
        self._reserved += entry.stored

    def _leave(self, entry: Resident) -> None:
        self._leaving -= entry.stored
        self._reserved -= entry.stored

    def _restore(self, entry: Resident) -> None:
        self._leave(entry)
        last_use = entry.last_use
        self._insert(entry)
        entry.last_use = last_use
        self._orders[entry.order_class].move_to_end(entry.key, last=False)
