"""Crash: what a process leaves behind when it is killed at any moment."""

from __future__ import annotations

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.crash import Crasher, Operate
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.values import PAGE, difference, key_named, value_of
from lmcache_core_conformance.verdicts import Violation, check

_PAGES = 8
_SWEPT_POINTS = 10


class Crash(Group):
    group = "crash"

    @needs("persistent")
    def test_values_survive_close_and_reopen(self) -> None:
        """A restart that orphans what was stored fills the medium with duplicates and hits nothing."""
        place, values = self.bench.place(), self.some_values(6)
        store = self.bench.open(place)
        for key, value in values:
            self.put(store, key, value)
        store.put(values[0][0], value_of(values[0][0], 2, PAGE))
        store.close()
        store = self.bench.open(place)
        self.holds(store, values[0][0], value_of(values[0][0], 2, PAGE), "an overwritten value after reopen")
        for key, value in values[1:]:
            self.holds(store, key, value, "a value after reopen")
            check(store.stat(key).nbytes == len(value), "stat after reopen has another length")
        if self.bench.capabilities.scan:
            found = {entry.key for entry in store.scan()}
            check(found == {key for key, _ in values}, f"a scan after reopen gave {len(found)} of 6 keys")

    @needs("persistent", "delete")
    def test_deleted_values_stay_deleted_after_reopen(self) -> None:
        """A tenant's data that was cleared must not come back with the next start."""
        place, values = self.bench.place(), self.some_values(3)
        store = self.bench.open(place)
        for key, value in values:
            self.put(store, key, value)
        store.delete(values[0][0])
        store.close()
        store = self.bench.open(place)
        self.lacks(store, values[0][0], len(values[0][1]), "a deleted value after reopen")
        self.holds(store, values[1][0], values[1][1], "a value beside it")
        store.close()
        key, nbytes = key_named("deleted, then killed"), len(values[0][1])
        ended = Crasher(self.bench.harness, place.options).run(
            [Operate("put", key, 1, nbytes)], [Operate("delete", key)]
        )
        check(set(ended.statuses) == {"ok"}, f"put and delete in a fresh process ended {ended.statuses}")
        self.lacks(self.bench.open(place), key, nbytes, "a value whose delete ended OK before kill -9")

    @needs("persistent")
    def test_a_put_that_was_acknowledged_survives_kill_9(self) -> None:
        """OK is a promise: the chain drops nearer copies because this one is said to be there."""
        place = self.bench.place()
        keys = [key_named(f"acknowledged-{n}") for n in range(3)]
        puts = [Operate("put", key, 1, self.bench.fit(_PAGES)) for key in keys]
        crasher = Crasher(self.bench.harness, place.options)
        ended = crasher.run([], puts)
        check(set(ended.statuses) == {"ok"}, f"puts in a fresh process ended {ended.statuses}")
        store = self.bench.open(place)
        for key in keys:
            self.holds(store, key, value_of(key, 1, self.bench.fit(_PAGES)), "a value put before kill -9")

    @needs("persistent")
    def test_kill_9_during_a_put_leaves_all_of_it_or_nothing(self) -> None:
        """A half-done store that is visible afterwards is served later, as if it were whole."""
        nbytes = self.bench.fit(_PAGES)
        place, neighbour = self.bench.place(), key_named("neighbour")
        prepare = [Operate("put", neighbour, 1, nbytes)]
        crasher = Crasher(self.bench.harness, place.options)
        points = crasher.points(prepare, [Operate("put", key_named("first"), 1, nbytes)])
        for point in points:
            key = key_named(f"put-{point.kind}-{point.number}")
            crasher.run(prepare, [Operate("put", key, 1, nbytes)], point)
            self._check_after(place, key, [None, value_of(key, 1, nbytes)], f"put at {point}")
            self._check_neighbour(place, neighbour, value_of(neighbour, 1, nbytes), f"put at {point}")

    @needs("persistent")
    def test_kill_9_during_an_overwrite_leaves_the_old_or_the_new_value(self) -> None:
        """Two versions of a chunk mixed on the medium, or neither of them, is what in-place writing gives."""
        nbytes, place, key = self.bench.fit(_PAGES), self.bench.place(), key_named("overwritten")
        old, new = value_of(key, 1, nbytes), value_of(key, 2, nbytes)
        prepare, act = [Operate("put", key, 1, nbytes)], [Operate("put", key, 2, nbytes)]
        crasher = Crasher(self.bench.harness, place.options)
        for point in crasher.points(prepare, act):
            crasher.run(prepare, act, point)
            self._check_after(place, key, [old, new], f"overwrite at {point}")

    @needs("persistent", "delete")
    def test_kill_9_during_a_delete_leaves_the_value_or_nothing(self) -> None:
        """A value whose name goes before its bytes, or the other way round, is a lie or a leak."""
        nbytes, place = self.bench.fit(_PAGES), self.bench.place()
        crasher = Crasher(self.bench.harness, place.options)
        first = key_named("first")
        points = crasher.points([Operate("put", first, 1, nbytes)], [Operate("delete", first)])
        for point in points:
            key = key_named(f"delete-{point.kind}-{point.number}")
            crasher.run([Operate("put", key, 1, nbytes)], [Operate("delete", key)], point)
            self._check_after(place, key, [None, value_of(key, 1, nbytes)], f"delete at {point}")

    @needs("persistent", "delete")
    def test_kill_9_while_room_is_made_leaves_each_value_whole_or_absent(self) -> None:
        """Eviction gives one value's room to another: a crash in between must not mix the two."""
        nbytes, place = self.bench.fit(_PAGES), self.bench.place()
        crasher = Crasher(self.bench.harness, place.options)
        victims, new = [key_named(f"victim-{n}") for n in range(2)], key_named("in their place")
        prepare = [Operate("delete", new), *(Operate("put", key, 1, nbytes) for key in victims)]
        act = [*(Operate("delete", key) for key in victims), Operate("put", new, 2, nbytes)]
        for point in crasher.points(prepare, act):
            crasher.run(prepare, act, point)
            for key, version in ((victims[0], 1), (victims[1], 1), (new, 2)):
                self._check_after(place, key, [None, value_of(key, version, nbytes)], f"eviction at {point}")

    @needs("persistent")
    def test_what_killed_writers_leave_behind_is_swept(self) -> None:
        """A temporary file for each crash fills a disk slowly, and outside every count of used bytes."""
        nbytes, place, key = self.bench.fit(_PAGES), self.bench.place(), key_named("swept")
        prepare, act = [Operate("put", key, 1, nbytes)], [Operate("put", key, 2, nbytes)]
        reach, seen = Reach(self.bench, place), list[int]()
        crasher = Crasher(self.bench.harness, place.options)
        points = crasher.points(prepare, act, limit=_SWEPT_POINTS)
        for _ in range(3):
            for point in points:
                crasher.run(prepare, act, point)
            self.bench.open(place).close()
            seen.append(reach.medium_objects())
        check(
            not seen[0] < seen[1] < seen[2],
            f"after three times {len(points)} crashes and a reopen the medium holds {seen} objects",
        )

    def _check_after(self, place: Place, key: StorageKey, allowed: list[bytes | None], what: str) -> None:
        """Checks in this process that the key holds one of `allowed` (None: nothing), and says so."""
        store = self.bench.open(place)
        try:
            got, stat = store.get(key, self.bench.fit(_PAGES)), store.stat(key)
            if got.status is Status.MISS:
                check(None in allowed, f"kill -9 during {what} lost the value")
                check(stat.status is Status.MISS, f"kill -9 during {what}: stat {stat.status.name}, get MISS")
                return
            check(
                got.status is Status.OK, f"kill -9 during {what}: get {got.status.name} ({got.outcome.error})"
            )
            check(stat.status is Status.OK, f"kill -9 during {what}: stat {stat.status.name}, get OK")
            if got.value not in allowed:
                whole = [value for value in allowed if value is not None]
                raise Violation(f"kill -9 during {what} left a mixture: {difference(whole[-1], got.value)}")
        finally:
            store.close()

    def _check_neighbour(self, place: Place, key: StorageKey, value: bytes, what: str) -> None:
        store: Store = self.bench.open(place)
        try:
            self.holds(store, key, value, f"another value after kill -9 during {what}")
        finally:
            store.close()
