"""What one tier holds, what is on its way there or away, and how many bytes all of that is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from lmcache_core.events import EventBus
from lmcache_core.identity.keys import StorageKey
from lmcache_core.tiers.ranking import Ranking, Resident, oldest_first
from lmcache_core.tiers.stream import ResidencyStream

__all__ = ["IndexStats", "ResidencyIndex", "Resident"]


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

    Invariant (under `_lock`): what is chosen for a reservation makes used + reserved <= capacity once the
    victims are gone, where used is the sum of `stored` over visible entries, and reserved covers puts under
    way and copies chosen for eviction but not yet gone. A parent with resident children, a pinned key or a
    leased frame is never chosen.

    Ctrl-C may come at any call here. A copy changes its place, and the byte counts with it, in a stretch
    of statements without a call; all else is derived and recounted. What is hidden is put, in that same
    stretch, into the caller's list, who then sees to it, whatever is raised; `gone`, `kept` and `give_up`
    do nothing the second time.
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
        self._here: dict[StorageKey, Resident] = {}
        self._ranking = Ranking(self._here, self._held)
        self._whole = _Whole(self._ranking, self._stream)
        self._reserved = 0
        self._leaving = 0  # the part of _reserved that chosen victims still occupy
        self._writing = 0  # the part of _reserved that puts under way occupy, wholly or in part

    # -- reading ---------------------------------------------------------------------------------

    def __contains__(self, key: StorageKey) -> bool:
        return key in self._here

    def __len__(self) -> int:
        return len(self._here)

    def get(self, key: StorageKey) -> Resident | None:
        return self._here.get(key)

    def prefix_length(self, keys: Sequence[StorageKey], start: int = 0) -> int:
        """How many of `keys` from `start` on are here without a gap."""
        here = self._here
        position = start
        for position in range(start, len(keys)):
            if keys[position] not in here:
                return position - start
        return max(len(keys) - start, 0)

    def keys(self, prefix: str = "") -> list[StorageKey]:
        with self._lock:
            return [key for key in self._here if key.startswith(prefix)]

    def stats(self) -> IndexStats:
        with self._lock:
            return IndexStats(
                len(self._here),
                self._ranking.used_bytes,
                self._reserved,
                self._capacity,
                self._stream.sequence,
                self._stream.evictions,
            )

    # -- admission -------------------------------------------------------------------------------

    def mark(self) -> int:
        """A moment, for `since`."""
        return self._ranking.tick

    def reserve(self, nbytes: int, since: int | None = None) -> list[Resident] | None:
        """Sets `nbytes` aside for a put, choosing victims where needed; none used after `since`.

        Returns the victims, hidden: no longer visible, their bytes counted until `gone` is told of each.
        The reservation counts at once, so the caller must see victims gone before it writes. None: no
        room can be made (larger than the tier, or the rest is pinned, leased or has children here).
        Only for threads that Ctrl-C doesn't come to.
        """
        victims: list[Resident] = []
        with self._lock, self._whole:
            if not self._choose(nbytes, since, victims):
                return None
            self._reserved += nbytes
        self._stream.flush()
        return victims

    def take_room(self, copy: Resident, victims: list[Resident], since: int | None = None) -> bool:
        """`reserve` and `begin` in one, for a medium that gives up a copy the moment it is told to.

        The room is `copy`'s, until `admit` or `give_up`. False: no room can be made.
        """
        nbytes = copy.stored
        with self._lock, self._whole:
            if not self._choose(nbytes, since, victims):
                return False
            copy.reserved = nbytes
            self._reserved += nbytes
            self._writing += nbytes
        self._stream.flush()
        return True

    def give_up(self, copy: Resident) -> None:
        """Gives back the room that was taken for `copy`, if it still has it."""
        with self._lock:
            self._reserved -= copy.reserved
            self._writing -= copy.reserved
            copy.reserved = 0

    def begin(self, nbytes: int) -> bool:
        """Whether a reserved put of `nbytes` may write now: the medium has the room, victims being gone.

        True once; the bytes then count as written until `admit` or `unreserve`.
        """
        with self._lock:
            occupied = self._ranking.used_bytes + self._leaving + self._writing
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
        with self._lock, self._whole:
            if victim.key in self._here:  # a newer copy took its place; the old bytes are gone with it
                self._leave(victim)
            elif victim.place == "leaving":
                self._return(victim)
                self._ranking.add(victim)  # as the newest: another victim is tried next time
                self._stream.admitted(victim.key, victim.stored)
        self._stream.flush()

    def admit(self, entry: Resident, *, reserved: int = 0) -> Resident | None:
        """Makes `entry` visible, using its room or `reserved` bytes, begun. Returns the copy it replaces.

        An older copy (smaller token) never replaces a newer one; then `entry` itself is returned.
        """
        with self._lock, self._whole:
            old = self._here.get(entry.key)
            reserved += entry.reserved
            entry.reserved = 0
            self._reserved -= reserved
            self._writing -= reserved
            if old is not None:
                if old.token is not None and entry.token is not None and entry.token < old.token:
                    return entry
                old.place = "outside"
            entry.place = "here"
            self._here[entry.key] = entry
            if old is not None:
                self._ranking.drop(old)
                self._stream.evicted(old.key, old.stored, "replaced")
            self._ranking.add(entry)
            self._stream.admitted(entry.key, entry.stored)
        self._stream.flush()
        return old

    def load(self, entries: Iterable[Resident]) -> None:
        """Fills an empty index from what a tier kept, oldest first, ancestors made newer than descendants."""
        for entry in oldest_first(entries):
            self.admit(entry)

    # -- use and removal -------------------------------------------------------------------------

    def touch(self, keys: Sequence[StorageKey]) -> None:
        """Marks a path from the root as used: the deepest first, so that its ancestors are newer."""
        with self._lock, self._whole:
            for key in reversed(keys):
                entry = self._here.get(key)
                if entry is not None:
                    self._ranking.use(entry)

    def remove(self, key: StorageKey, reason: str, *, token: int | None = None) -> Resident | None:
        """Forgets a copy that is gone. With `token`, only that copy or an older one."""
        with self._lock, self._whole:
            entry = self._here.get(key)
            if entry is None:
                return None
            if token is not None and entry.token is not None and entry.token > token:
                return None
            entry.place = "outside"
            del self._here[key]
            self._ranking.drop(entry)
            self._stream.evicted(entry.key, entry.stored, reason)
        self._stream.flush()
        return entry

    def forget_all(self, reason: str) -> None:
        for key in self.keys():
            self.remove(key, reason)

    def take(self, keys: Iterable[StorageKey], reason: str, taken: list[Resident]) -> None:
        """Hides these copies ahead of their removal, like victims; pinned and leased ones stay."""
        with self._lock, self._whole:
            for key in keys:
                entry = self._here.get(key)
                if entry is not None and not self._held(entry):
                    self._hide(entry, reason, taken)
        self._stream.flush()

    def take_families(self, keys: Sequence[StorageKey], taken: list[Resident]) -> None:
        """Hides these copies with everything that hangs on them here, deepest first; or, where one of
        all these must stay, none."""
        with self._lock, self._whole:
            named = [entry for key in keys if (entry := self._here.get(key)) is not None]
            family = [] if any(map(self._held, named)) else self._ranking.family(keys)
            if not any(map(self._held, family)):
                for entry in family:
                    self._hide(entry, "capacity", taken)
        self._stream.flush()

    def take_copy(self, copy: Resident, reason: str) -> bool:
        """Hides exactly this copy, pinned or not; False when it is no longer the one that is here."""
        taken: list[Resident] = []
        with self._lock, self._whole:
            if self._here.get(copy.key) is copy:
                self._hide(copy, reason, taken)
        self._stream.flush()
        return bool(taken)

    def take_coldest(self, order_class: int, taken: list[Resident]) -> None:
        """Hides the coldest copy of a size class that can leave with its family, and that family, deepest
        first. (Its leaf is often of another class: a tail.) Nothing taken: none can."""
        with self._lock, self._whole:
            for entry in self._ranking.coldest_family(order_class):
                self._hide(entry, "capacity", taken)
        self._stream.flush()

    def coldest_use(self, order_class: int) -> int | None:
        """When the copy was last used that `take_coldest` would choose."""
        with self._lock:
            family = self._ranking.coldest_family(order_class)
            return family[-1].last_use if family else None

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the bound; what is above it leaves with the next reservations."""
        with self._lock:
            self._capacity = capacity_bytes

    # -- under the lock --------------------------------------------------------------------------

    def _held(self, entry: Resident) -> bool:
        return (entry.hold is not None and entry.hold.leased) or self._pinned(entry.key)

    def _choose(self, nbytes: int, since: int | None, victims: list[Resident]) -> bool:
        """Hides what must leave for `nbytes` more; False, and nothing hidden, when that isn't enough."""
        if self._capacity is None:
            return True
        ranking = self._ranking
        wanted = ranking.used_bytes + self._reserved - self._leaving + nbytes - self._capacity
        while wanted > 0:
            victim = ranking.coldest()
            if victim is None or (since is not None and victim.last_use > since):
                for entry in reversed(victims):
                    self._return(entry)
                    ranking.add_oldest(entry)
                victims.clear()
                return False
            self._hide(victim, "", victims)
            wanted -= victim.stored
        for victim in victims:
            self._stream.evicted(victim.key, victim.stored, "capacity")
        return True

    def _hide(self, entry: Resident, reason: str, taken: list[Resident]) -> None:
        """Without a `reason`, the stream is told later."""
        taken += [entry]
        entry.place = "leaving"
        del self._here[entry.key]
        self._leaving += entry.stored
        self._reserved += entry.stored
        self._ranking.drop(entry)
        if reason:
            self._stream.evicted(entry.key, entry.stored, reason)

    def _return(self, entry: Resident) -> None:
        """The caller has the ranking add it."""
        entry.place = "here"
        self._here[entry.key] = entry
        self._leaving -= entry.stored
        self._reserved -= entry.stored

    def _leave(self, entry: Resident) -> None:
        if entry.place == "leaving":
            entry.place = "outside"
            self._leaving -= entry.stored
            self._reserved -= entry.stored


class _Whole:
    """Around each change, inside the lock: where one is cut short, derives all that follows from it anew."""

    def __init__(self, ranking: Ranking, stream: ResidencyStream) -> None:
        self._ranking = ranking
        self._stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._ranking.recount()
            self._stream.skip()
