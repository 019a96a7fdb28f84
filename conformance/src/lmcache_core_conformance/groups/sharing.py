"""Sharing: several processes use one store and each sees what the others did, or one alone does."""

from __future__ import annotations

from lmcache_core.errors import BackendUnavailable, ConfigError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.bench import Place, spread
from lmcache_core_conformance.crash import Crasher, Operate
from lmcache_core_conformance.preemption import interrupt
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, check
from lmcache_core_conformance.watch import rounds

_MOST_LINES = 30


class Sharing(Group):
    group = "sharing"

    @needs("persistent")
    def test_a_store_that_is_not_shared_has_one_owner_or_one_bound(self) -> None:
        """Two tiers on one directory by mistake fill it twice over, and sweep away each other's writes."""
        if self.bench.capabilities.shared:
            raise NotApplicable("capability shared is True")
        bound, place = self.bench.harness.small_capacity_bytes, self.bench.place(small=True)
        first, (key, value) = self.bench.open(place, capacity_bytes=bound), self.some_values(1)[0]
        self.put(first, key, value)
        try:
            second = self.bench.open(place, capacity_bytes=bound)
        except (BackendUnavailable, ConfigError):
            self.holds(first, key, value, "a value of a store that somebody else tried to open")
            first.close()
            self.holds(self.bench.open(place, capacity_bytes=bound), key, value, "a value of the next owner")
            return
        stores, stored = (first, second), 0
        nbytes = self.bench.fit(max(bound // 32 // PAGE, 1))
        for n in range(2 * bound // nbytes + 2):
            new = key_named(f"one of two owners {n}")
            outcome = stores[n % 2].put(new, value_of(new, 1, nbytes))
            stored += nbytes if outcome.status is Status.OK else 0
        if not self.bench.capabilities.self_evicting:
            check(stored <= bound, f"two openings of one store hold {stored} bytes under a bound of {bound}")
        if self.bench.capabilities.medium == "file":
            occupied = Reach(self.bench, place).medium_bytes()
            check(occupied <= bound, f"two openings of one store occupy {occupied} bytes, not {bound}")

    @needs("shared")
    def test_a_value_put_by_another_process_is_seen(self) -> None:
        """A cache shared by a fleet pays only if what one engine computed is a hit for the next."""
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("from another process")
        self.lacks(store, key, PAGE, "a key that nobody has stored yet")
        ended = Crasher(self.bench.harness, place.options).run(
            [], [Operate("put", key, 1, self.bench.fit(2))]
        )
        check(ended.statuses == ("ok",), f"a put in another process ended {ended.statuses}")
        self.holds(store, key, value_of(key, 1, self.bench.fit(2)), "a value put by another process")
        check(store.stat(key).status is Status.OK, "stat of a value put by another process is not OK")

    @needs("shared")
    def test_an_overwrite_by_another_client_is_seen(self) -> None:
        """A copy kept on this side after another client replaced the value is an answer about the past."""
        place = self.bench.place()
        ours, theirs, key = self.bench.open(place), self.bench.open(place), key_named("replaced")
        for version in (1, 2, 3):
            writer, reader = (ours, theirs) if version % 2 else (theirs, ours)
            value = value_of(key, version, version * PAGE)
            self.put(writer, key, value)
            self.holds(reader, key, value, f"version {version}, put by another client")
            self.holds(writer, key, value, f"version {version}, put by this client")
            for store in (writer, reader):
                nbytes = store.stat(key).nbytes
                check(nbytes == len(value), f"stat of version {version}: {nbytes} bytes of {len(value)}")
        self._in_the_middle_of_a_put(place, key)

    @needs("shared")
    def test_tokens_grow_whoever_puts(self) -> None:
        """Clients that count for themselves give an old copy a higher token than the one that replaced it."""
        place = self.bench.place()
        stores, key = [self.bench.open(place), self.bench.open(place)], key_named("tokens of two clients")
        tokens: list[int] = []
        for version, store in enumerate((stores[0], stores[0], stores[1], stores[0], stores[1])):
            token = store.put(key, value_of(key, version, PAGE)).token
            if token is None:
                raise NotApplicable("the backend gives its copies no tokens (Outcome.token is None)")
            tokens.append(token)
        check(tokens == sorted(set(tokens)), f"copies put in turn by two clients had the tokens {tokens}")

    @needs("shared", "delete")
    def test_a_value_deleted_by_another_client_is_a_miss(self) -> None:
        """Clearing a tenant's data clears it for every engine, also for those that have just read it."""
        place = self.bench.place()
        ours, theirs = self.bench.open(place), self.bench.open(place)
        key, value = self.some_values(1)[0]
        self.put(ours, key, value)
        self.holds(theirs, key, value, "a value put by another client")
        status = theirs.delete(key).status
        check(status is Status.OK, f"delete of another client's value: {status.name}")
        for store in (ours, theirs):
            self.lacks(store, key, len(value), "a value that a client deleted")

    def _in_the_middle_of_a_put(self, place: Place, key: StorageKey) -> None:
        """At each line of a put by one client a second one puts the same key, and a third opens the store."""
        ours, theirs = self.bench.open(place), self.bench.open(place)  # which have both done as much so far
        nbytes = self.bench.fit(2)
        values = [value_of(key, version, nbytes) for version in (4, 5)]

        def put_ours() -> None:
            self.put(ours, key, values[0])

        def meanwhile() -> None:
            self.bench.open(place).close()
            self.put(theirs, key, values[1])

        lines = interrupt(put_ours, 0, meanwhile)
        for line in rounds(spread(lines, min(self.bench.harness.interruptions, _MOST_LINES))):
            interrupt(put_ours, line, meanwhile)
            seen = [store.get(key, nbytes) for store in (ours, theirs)]
            check(seen[0].value in values, "two clients put one key, and it holds the value of neither")
            self.check_value(seen[1], seen[0].value, "a key that two clients put, as the other one sees it")
