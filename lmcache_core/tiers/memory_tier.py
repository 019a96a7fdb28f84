"""A tier whose frames stay where they lie in the pool: putting and borrowing move no bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmcache_core.errors import BackendError
from lmcache_core.events import EventBus, StoreShed
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold, Lease, PinTable
from lmcache_core.storage import Backend, BackendStats, Outcome, Resident, Status
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.index import IndexStats, ResidencyIndex
from lmcache_core.tiers.index import Resident as Copy
from lmcache_core.tiers.jobs import why

log = logging.getLogger(__name__)


class MemoryTier:
    """Index and backend of a resident tier. Nothing here blocks or does I/O.

    It is also the pool's reclaimer: when an allocation finds no room, the pool asks here for the coldest
    frame of a size class, or for everything in one slab. Evicting a frame for its memory also ends the
    writes that wait for it (`Hold.evict`).
    """

    def __init__(
        self,
        name: str,
        backend: Backend[object],
        capacity_bytes: int,
        *,
        pins: PinTable,
        events: EventBus,
    ) -> None:
        if not isinstance(backend, Resident):
            raise TypeError(f"tier {name}: {type(backend).__name__} does not keep frames in memory")
        self.name = name
        self.index = ResidencyIndex(
            name, capacity_bytes, pinned=lambda key: pins.pinned(name, key), events=events
        )
        self._storing: dict[StorageKey, Frame] = {}  # each step on it is atomic by itself
        self._backend: Backend[object] = backend
        self._resident: Resident = backend
        self._emit = events.emit

    # -- the chain's side ------------------------------------------------------------------------

    def prefix_length(self, keys: Sequence[StorageKey], start: int, deadline: float) -> int:
        return self.index.prefix_length(keys, start)

    def contains(self, key: StorageKey) -> bool:
        return key in self.index

    def lacks(self, key: StorageKey) -> bool:
        """Whether a write of `key` would bring something."""
        return key not in self.index

    def held(self, keys: Sequence[StorageKey], deadline: float) -> list[bool]:
        return [key in self.index for key in keys]

    def list_keys(self, prefix: str, deadline: float) -> list[StorageKey]:
        return self.index.keys(prefix)

    def store(self, frame: Frame, since: int | None = None) -> bool:
        """Keeps `frame` here under a reference of its own; the caller's lease is untouched.

        Nothing that was used after `since` leaves for it. One thread at a time stores a key.
        """
        key = frame.key
        try:
            if self._storing.setdefault(key, frame) is not frame:
                return True
            return self._store(frame, since)
        finally:
            if key in self._storing and self._storing[key] is frame:  # no call here: no place for Ctrl-C
                del self._storing[key]

    def _store(self, frame: Frame, since: int | None) -> bool:
        hold = frame.lease.hold(tag=frame.key)
        header = frame.header
        copy = Copy(frame.key, frame.nbytes, hold.slot_nbytes, parent=header.parent, hold=hold, header=header)
        victims: list[Copy] = []
        try:
            if not self.index.take_room(copy, victims, since):
                self._forsake(copy, victims)
                self._shed(frame.key, "no room", "the rest is pinned or in use")
                return False
            for victim in victims:  # only leaves this tier: a write that waits for its bytes keeps them
                self._discard(victim)
            outcome = self._adopt(frame.key, hold)
            if outcome.status is not Status.OK:
                self._forsake(copy, victims)
                self._shed(frame.key, "failed", why(outcome))
                return False
            self.index.admit(copy)
            return True
        except BaseException:
            self._forsake(copy, victims)
            raise

    def _forsake(self, copy: Copy, victims: Sequence[Copy]) -> None:
        """Ends a store that didn't come to its end, at whatever point; or does nothing if it did."""
        self._see_off(victims)
        if copy.place == "outside":
            self._drop(copy)
            self.index.give_up(copy)

    def borrow(self, key: StorageKey, owner: str) -> Frame | None:
        """The frame under a new lease, or None when it is not, or no longer, here."""
        copy = self.index.get(key)
        if copy is None or copy.header is None:
            return None
        try:
            lease = self._resident.borrow(key)
        except Exception:  # noqa: BLE001  (recorded boundary: plugin code)
            lease = None
        if not isinstance(lease, Lease):
            self.index.remove(key, "lost")
            return None
        return Frame(copy.header, lease, sealed=False)

    def remove(self, keys: Sequence[StorageKey], reason: str) -> int:
        """Drops these copies; leased and pinned ones stay. Returns how many went."""
        victims: list[Copy] = []
        try:
            self.index.take(keys, reason, victims)
            for victim in victims:
                self._discard(victim)
        except BaseException:
            self._see_off(victims)
            raise
        return len(victims)

    def stats(self) -> tuple[IndexStats, BackendStats]:
        return self.index.stats(), self._backend.stats()

    def close(self) -> None:
        try:
            self._backend.close()
        except Exception:  # recorded boundary: plugin code
            log.exception("tier %s: close raised", self.name)

    # -- the pool's side (memory.Reclaimer) ------------------------------------------------------

    def coldest(self, slot_nbytes: int) -> int | None:
        return self.index.coldest_use(slot_nbytes)

    def evict_coldest(self, slot_nbytes: int) -> bool:
        victims: list[Copy] = []
        try:
            self.index.take_coldest(slot_nbytes, victims)
            return self._evict(victims) > 0
        except BaseException:
            self._see_off(victims)
            raise

    def evict(self, holds: Sequence[Hold]) -> int:
        """All of these frames with all that hangs on them, or, where one must stay, none."""
        victims: list[Copy] = []
        try:
            self.index.take_families([hold.tag for hold in holds if hold.tag is not None], victims)
            return self._evict(victims)
        except BaseException:
            self._see_off(victims)
            raise

    # -- inside ----------------------------------------------------------------------------------

    def _evict(self, victims: Sequence[Copy]) -> int:
        """Takes the memory of hidden copies; how many went. One leased meanwhile comes back instead."""
        evicted = 0
        for victim in victims:
            hold = victim.hold
            if hold is not None and hold.alive and not hold.evict():
                self.index.kept(victim)
            else:
                self._discard(victim)
                evicted += 1
        return evicted

    def _see_off(self, victims: Sequence[Copy]) -> None:
        """After Ctrl-C: drops those of the hidden copies that have neither gone nor come back."""
        for victim in victims:
            if victim.place == "leaving":
                self._discard(victim)

    def _adopt(self, key: StorageKey, hold: Hold) -> Outcome:
        try:
            outcome: object = self._resident.adopt(key, hold)
            if isinstance(outcome, Outcome):
                return outcome
            error = BackendError(
                f"adopt returned {type(outcome).__name__}, not an Outcome", backend=self.name
            )
            return Outcome(status=Status.FAILED, error=error)
        except Exception as error:  # noqa: BLE001  (recorded boundary: plugin code)
            return Outcome(
                status=Status.FAILED, error=BackendError(str(error), backend=self.name, op="adopt", key=key)
            )

    def _discard(self, victim: Copy) -> None:
        self._drop(victim)
        self.index.gone(victim)

    def _drop(self, victim: Copy) -> None:
        if victim.hold is not None:
            try:
                self._resident.discard(victim.key, victim.hold)
            except Exception:  # recorded boundary: plugin code
                log.exception("tier %s: discard raised", self.name)
            victim.hold.drop()

    def _shed(self, key: StorageKey, reason: str, detail: str) -> None:
        self._emit(StoreShed(tier=self.name, key=key, reason=reason, detail=detail))
