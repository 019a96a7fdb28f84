"""Capacity: the bound is a bound, and being full costs nothing that is already there."""

from __future__ import annotations

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Outcome, Status
from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.preemption import at_every_line
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.timing import deadline_of
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, check

_REFUSALS = 12
_VALUES_TO_FILL = 64
"""How many values of the size chosen fill the bound."""
_VALUES_COUNTED = 16
_PAGES_COUNTED = 64
_COPIES = 4
_SPARE = 1 << 20


class Capacity(Group):
    group = "capacity"

    def test_a_full_store_says_so_and_keeps_what_it_has(self) -> None:
        """FULL is how the core learns to evict; a store that drops old values instead loses them unseen."""
        store, stored = self._fill()
        check(
            len(stored) >= _VALUES_TO_FILL // 4,
            f"FULL after {len(stored)} of about {_VALUES_TO_FILL} values, by which small_capacity_bytes "
            f"({self.bench.harness.small_capacity_bytes}) is meant to be full: a store that takes room in "
            "large steps needs more",
        )
        for key, value in stored:
            self.holds(store, key, value, "a value stored before the store was full")

    def test_what_is_charged_explains_that_the_store_is_full(self) -> None:
        """The core makes room by its own sums of what was charged: too little, and it never evicts."""
        store, stored = self._fill()
        bound, charged = self.bench.harness.small_capacity_bytes, 0
        for call in store.calls[: len(stored)]:
            outcome = call.outcomes[0]
            charged += len(stored[0][1]) if outcome.stored is None else outcome.stored
        check(charged >= bound // 4, f"the store is full at {bound} bytes, and has charged {charged}")
        check(charged <= bound * 5 // 4, f"a store of at most {bound} bytes has charged {charged}")

    def test_what_is_charged_and_counted_follows_what_is_stored(self) -> None:
        """Charged a hundredfold, the core evicts nearly everything; operators size tiers by the counts."""
        place = self.bench.place()
        store, reach = self.bench.open(place), Reach(self.bench, place)
        nbytes = self.bench.fit(_PAGES_COUNTED)
        keys = [key_named(f"counted {n}") for n in range(_VALUES_COUNTED)]
        empty, total = store.stats().used_bytes, nbytes * len(keys)
        for key in keys:
            outcome = store.put(key, value_of(key, 1, nbytes))
            check(outcome.status is Status.OK, f"put of {nbytes} bytes: {outcome.status.name}")
            self._is_fair(outcome.stored, nbytes, "put")
        if self.bench.capabilities.scan:
            for entry in store.scan():
                self._is_fair(entry.stored, entry.nbytes, "scan")
        used = store.stats().used_bytes
        self._is_fair(used - empty, total, "stats")
        if not self.bench.capabilities.delete or self.bench.capabilities.medium == "network":
            return  # when a server gives room back is its own affair
        for key in keys:
            store.delete(key)
        left = store.stats().used_bytes
        if self.bench.capabilities.medium == "file":  # where what was freed may go on taking room
            occupied = reach.medium_bytes()
            due = left <= 2 * occupied + _SPARE
            check(due, f"all is deleted, {occupied} bytes are occupied, and stats says {left}")
        else:
            check(left - empty <= total // 2, f"{used} bytes were used, all is deleted, stats says {left}")

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

    def test_overwriting_costs_no_room(self) -> None:
        """Room lost a little with each overwrite makes a tier that says FULL for ever, a day later."""
        store = self.bench.open(capacity_bytes=self.bench.harness.small_capacity_bytes)
        key, first = self._values()[0]
        nbytes = max(len(first) // PAGE, 2) * PAGE
        values = [value_of(key, n, self.bench.fit(nbytes // PAGE - n)) for n in range(2)]
        for version in range(_VALUES_TO_FILL * 2):
            status = store.put(key, values[version % 2]).status
            check(status is Status.OK, f"overwrite {version} of the only value, with room: {status.name}")

    @needs("delete")
    def test_refused_puts_cost_no_room(self) -> None:
        """A full tier is asked again and again: what each refusal takes is missing when room was made."""
        store, stored = self._fill()
        value = stored[0][1]
        for n in range(_VALUES_TO_FILL // 2):
            other = key_named(f"refused {n % 3}")
            store.put(other, 4 * value)
            with deadline_of(store, -1.0):
                store.put(other, value)
            if store.stat(other).status is Status.OK:  # a store that found a place for it after all
                store.delete(other)
        for _ in range(2):
            for other, _ in stored[:4]:
                store.delete(other)
            for other, content in stored[:2]:
                self.put(store, other, content)

    @needs("persistent")
    def test_the_bound_holds_for_what_was_there_before(self) -> None:
        """Counting from zero at each start, a store outgrows its bound by as much every time."""
        bound, place = self.bench.harness.small_capacity_bytes, self.bench.place(small=True)
        watched = self.bench.capabilities.medium == "file"
        for opened in range(3):
            store = self.bench.open(place, capacity_bytes=bound)
            self._check_bound(store, place, bound, watched)
            for n, (_, value) in enumerate(self._values()):
                key = key_named(f"opened {opened}, value {n}")
                status = store.put(key, value_of(key, 1, len(value))).status
                self._check_bound(store, place, bound, watched)
                if status is Status.FULL:
                    break
            store.close()

    def test_a_put_that_finds_the_medium_full_leaves_nothing_behind(self) -> None:
        """The disk fills in the middle of a value: what was written of it would keep the disk full."""
        self.bench.require_medium("file", why="what a refused value leaves there can't be looked at")
        place = self.bench.place()
        reach, (key, value) = Reach(self.bench, place), self.some_values(1, pages=16)[0]
        store = self.bench.open(place)
        self.put(store, key, value)
        store.put(key_named("warm"), value)
        objects, occupied = reach.medium_objects(), reach.medium_bytes()
        used = store.stats().used_bytes
        with reach.faulty(Fault.FULL, store):
            for n in range(_REFUSALS):
                other = key if n % 2 else key_named(f"no room {n}")
                status = store.put(other, value_of(other, n, len(value))).status
                check(status is not Status.OK, "put to a full medium ended OK")
        more = reach.medium_objects() - objects
        check(more < _REFUSALS // 2, f"{_REFUSALS} puts that found no room leave {more} files more")
        grown = reach.medium_bytes() - occupied
        check(grown < 2 * len(value), f"{_REFUSALS} puts that found no room leave {grown} bytes more")
        counted = store.stats().used_bytes - used
        check(counted < 2 * len(value), f"{_REFUSALS} puts that found no room are counted as {counted} bytes")

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

        reach = Reach(self.bench, place)
        check(reach.medium_bytes() <= bound, "the medium holds more than the bound")

        def look() -> None:
            occupied = reach.medium_bytes()
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

    def _is_fair(self, charged: int | None, nbytes: int, who: str) -> None:
        """Copies, parity and whole blocks may be charged: several times the value, and as much as a block."""
        due = charged is None or charged <= _COPIES * nbytes + _SPARE
        check(due, f"{who} charges {charged} bytes for {nbytes}")

    def _check_bound(self, store: Store, place: Place, bound: int, watched: bool) -> None:
        used = store.stats().used_bytes
        check(used <= bound, f"stats says {used} bytes are used under a bound of {bound}")
        if watched:
            occupied = Reach(self.bench, place).medium_bytes()
            check(occupied <= bound, f"the medium holds {occupied} bytes under a bound of {bound}")


def _discard(outcome: Outcome) -> None:
    """FULL or not: what was stored meanwhile is what counts."""
