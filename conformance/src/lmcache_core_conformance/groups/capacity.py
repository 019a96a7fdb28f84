"""Capacity: the bound is a bound, and being full costs nothing that is already there."""

from __future__ import annotations

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Outcome, Status
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.preemption import at_every_line
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, check

_VALUES_TO_FILL = 64
"""How many values of the size chosen fill the bound."""


class Capacity(Group):
    group = "capacity"

    def test_a_full_store_says_so_and_keeps_what_it_has(self) -> None:
        """FULL is how the core learns to evict; a store that drops old values instead loses them unseen."""
        store, stored = self._fill()
        check(
            len(stored) >= _VALUES_TO_FILL // 4, f"FULL after {len(stored)} of about {_VALUES_TO_FILL} values"
        )
        for key, value in stored:
            self.holds(store, key, value, "a value stored before the store was full")

    def test_an_overwrite_that_does_not_fit_keeps_the_old_value(self) -> None:
        """FULL promises that what was there is unchanged, above all the value being replaced."""
        store, stored = self._fill()
        key, old = stored[0]
        new = value_of(key, 2, self.bench.fit(len(old) // PAGE * _VALUES_TO_FILL))
        outcome = store.put(key, new)
        if outcome.status is Status.OK:
            check(len(new) < self.bench.harness.small_capacity_bytes, "a value of the whole bound fitted in")
            self.holds(store, key, new, "a larger value that fitted in after all")
        else:
            check(outcome.status is Status.FULL, f"an overwrite that does not fit: {outcome.status.name}")
            self.holds(store, key, old, "the value whose overwrite did not fit")

    def test_the_bound_is_never_exceeded(self) -> None:
        """Users share the medium with others: a cap that is not one fills their disk."""
        bound, place = self.bench.harness.small_capacity_bytes, self.bench.place()
        store = self.bench.open(place, capacity_bytes=bound)
        watched = self.bench.capabilities.medium == "file"
        for key, value in self._values():
            outcome = store.put(key, value)
            self._check_bound(store, place, bound, watched)
            if outcome.status is Status.FULL:
                break
        for version in (2, 3):  # overwrites in a full store need room for both copies, or are refused
            for key, value in self._values()[:8]:
                store.put(key, value_of(key, version, len(value)))
                self._check_bound(store, place, bound, watched)

    def test_the_bound_is_not_exceeded_for_a_moment(self) -> None:
        """A temporary that is gone when the call returns still filled the disk that others write to."""
        self.bench.require_medium("file", why="what it holds can't be looked at between two lines")
        bound, place = self.bench.harness.small_capacity_bytes, self.bench.place()
        store = self.bench.open(place, capacity_bytes=bound)
        values = self._values()
        for key, value in values:
            if store.put(key, value).status is Status.FULL:
                break

        def look() -> None:
            occupied = self.bench.harness.medium_bytes(place.directory)
            check(
                occupied <= bound, f"during a put the medium holds {occupied} bytes under a bound of {bound}"
            )

        for version, (key, value) in enumerate(values[:3], start=2):
            new = value_of(key, version, len(value))
            at_every_line(lambda key=key, new=new: _discard(store.put(key, new)), look)  # type: ignore[misc]

    @needs("delete")
    def test_deleting_makes_room_again(self) -> None:
        """Room that deleting doesn't give back makes a tier that works until it is full once."""
        store, stored = self._fill()
        for _ in range(3):
            store.delete_many([key for key, _ in stored[:4]][: self.bench.capabilities.max_batch])
            for key, value in stored[:1]:
                self.put(store, key, value)
                self.holds(store, key, value, "a value put after deleting others")

    def _fill(self) -> tuple[Store, list[tuple[StorageKey, bytes]]]:
        """A store that has just said FULL, and what it had said OK to."""
        if self.bench.capabilities.self_evicting:
            raise NotApplicable("capability self_evicting is True")
        store = self.bench.open(capacity_bytes=self.bench.harness.small_capacity_bytes)
        stored: list[tuple[StorageKey, bytes]] = []
        for key, value in self._values():
            outcome = store.put(key, value)
            if outcome.status is Status.FULL:
                self.lacks(store, key, len(value), "a value refused as FULL")
                return store, stored
            check(outcome.status is Status.OK, f"filling: {outcome.status.name} ({outcome.error})")
            stored.append((key, value))
        sizes = sum(len(value) for _, value in stored)
        check(False, f"{sizes} bytes were stored under a bound of {self.bench.harness.small_capacity_bytes}")
        return store, stored

    def _values(self) -> list[tuple[StorageKey, bytes]]:
        """More values than the bound has room for."""
        bound = self.bench.harness.small_capacity_bytes
        nbytes = self.bench.fit(max(bound // _VALUES_TO_FILL // PAGE, 1))
        keys = [key_named(f"filling-{n}") for n in range(bound // nbytes + _VALUES_TO_FILL // 4)]
        return [(key, value_of(key, 1, nbytes)) for key in keys]

    def _check_bound(self, store: Store, place: Place, bound: int, watched: bool) -> None:
        used = store.stats().used_bytes
        check(used <= bound, f"stats says {used} bytes are used under a bound of {bound}")
        if watched:
            occupied = self.bench.harness.medium_bytes(place.directory)
            check(occupied <= bound, f"the medium holds {occupied} bytes under a bound of {bound}")


def _discard(outcome: Outcome) -> None:
    """FULL or not: what was stored meanwhile is what counts."""
