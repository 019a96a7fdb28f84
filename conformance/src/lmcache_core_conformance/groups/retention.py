"""Retention: what leaves the store without the core, what must stay, and what the core is told of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, check

_VALUES_TO_FILL = 32
_ROUNDS = 4
_TTL_S = 0.05
_LONG_TTL_S = 60.0
_NOBODY_ELSE = "nothing leaves it behind the backend's back but by the pool, which the resident group covers"


class Retention(Group):
    group = "retention"

    def test_a_value_removed_behind_our_back_is_a_miss(self) -> None:
        """An answer remembered after the value expired is a hit that never comes, again and again."""
        self.bench.require_medium("file", "network", why=_NOBODY_ELSE)
        place = self.bench.place()
        store, values = self.bench.open(place), self.some_values(3)
        for key, value in values:
            self.put(store, key, value)
            self.holds(store, key, value)
        gone, length = values[1][0], len(values[1][1])
        Reach(self.bench, place).raw_delete(gone)
        if self.bench.capabilities.shared or self.bench.capabilities.self_evicting:
            status = store.stat(gone).status
            check(status is Status.MISS, f"stat of a value that was removed: {status.name}, due is MISS")
        got = store.get(gone, length)
        check(got.status is Status.MISS, f"get of a value that was removed: {got.status.name}, due is MISS")
        self.lacks(store, gone, length, "a value that was removed")
        for key, value in (values[0], values[2], (gone, value_of(gone, 2, length))):
            if key == gone:
                self.put(store, key, value)
            self.holds(store, key, value, "a value beside, or after, a removed one")

    @needs("self_evicting")
    def test_what_the_store_evicts_goes_whole(self) -> None:
        """A store that evicts parts of values goes on saying yes to values nobody can read any more."""
        _, store = self._small()
        values = list(itertools.islice(self._filling(), 2 * _VALUES_TO_FILL))
        for n, (key, value) in enumerate(values):
            self._put(store, key, value)
            for known, content in values[n % 8 :: 8]:
                stat = store.stat(known)
                if stat.status is Status.OK:
                    check(stat.nbytes == len(content), "stat of a value under eviction has another length")
        missing = overtaken = 0
        for key, value in values:
            stat, got = store.stat(key), store.get(key, len(value))
            if stat.status is Status.MISS:
                missing += 1
                check(got.status is Status.MISS, f"stat MISS, then get {got.status.name}")
            elif got.status is Status.MISS and store.stat(key).status is Status.MISS:
                overtaken += 1  # a full store may evict between two questions, but seldom
            else:
                self.check_value(got, value, "a value that stat called present")
        present = len(values) - missing
        check(
            overtaken * 8 <= present,
            f"{overtaken} of {present} values that stat called present were gone when they were read",
        )
        self._check_evicted(missing + overtaken)

    @needs("pin", "self_evicting")
    def test_a_pinned_value_is_not_evicted(self) -> None:
        """A pin is what a hit was promised on: broken, the engine waits for KV that never arrives."""
        _, store = self._small()
        filling = self._filling()
        pinned = list(itertools.islice(filling, 3))
        keys = [key for key, _ in pinned]
        for key, value in pinned:
            self._put(store, key, value)
        began = time.monotonic()
        seen = self._pin(store, keys, _LONG_TTL_S)
        check(set(seen) == {"OK"}, f"pin of stored values: {seen}")
        self.holds(store, *pinned[1], "a pinned value")
        self._pin(store, keys[2:], _TTL_S)
        unpinned: list[StorageKey] = []
        # At the least until the longer time was over if it were taken in milliseconds, and the shorter one.
        while not unpinned or time.monotonic() < began + 2 * max(_LONG_TTL_S / 1000, _TTL_S):
            for key, value in itertools.islice(filling, 2 * _VALUES_TO_FILL):
                self._put(store, key, value)
                unpinned.append(key)
        for (key, value), then in zip(pinned, ("", ", then read", ", then pinned for less"), strict=True):
            self.holds(store, key, value, f"a value pinned for {_LONG_TTL_S:g} s{then}")
        some = unpinned[: 2 * _VALUES_TO_FILL]
        self._check_evicted(sum(store.stat(key).status is Status.MISS for key in some))

    @needs("pin", "self_evicting")
    def test_a_pin_ends_with_its_time(self) -> None:
        """Pins that nobody takes back, from engines long gone, fill a store that can then store nothing."""
        _, store = self._small()
        filling = self._filling()
        key, value = next(filling)
        self._put(store, key, value)
        self._pin(store, [key], _TTL_S)
        over = time.monotonic() + 2 * _TTL_S  # the store's own clock counts it
        rounds = 0
        while rounds < _ROUNDS:
            rounds += time.monotonic() > over
            for other, content in itertools.islice(filling, 2 * _VALUES_TO_FILL):
                self._put(store, other, content)
            if store.stat(key).status is Status.MISS:  # not asked more often: being asked for keeps it
                return
        check(False, f"a value pinned for {_TTL_S} s was not evicted by {2 * _ROUNDS} times its room")

    @needs("pin")
    def test_pinning_what_is_absent_is_a_miss(self) -> None:
        """OK to a pin is taken as proof that the value is there."""
        store, (key, value) = self.bench.open(), self.some_values(1)[0]
        self.put(store, key, value)
        keys = [key_named("never stored"), key]
        seen = self._pin(store, keys, 1.0)
        check(seen == ["MISS", "OK"], f"pin of an absent and a stored key ended {seen}")

    def test_each_copy_has_a_higher_token_than_the_one_before(self) -> None:
        """Events come late: only a token tells that a loss is old news about a copy replaced since."""
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("tokens")
        tokens: list[int] = []

        def put(version: int) -> None:
            outcome = store.put(key, value_of(key, version, PAGE))
            check(outcome.status is Status.OK, f"put: {outcome.status.name}")
            if outcome.token is None:
                raise NotApplicable("the backend gives its copies no tokens (Outcome.token is None)")
            tokens.append(outcome.token)

        put(1)
        put(2)
        if self.bench.capabilities.delete:
            store.delete(key)
        put(3)
        if self.bench.capabilities.persistent:
            store.close()
            store = self.bench.open(place)
        put(4)
        check(tokens == sorted(set(tokens)), f"four copies of one key had the tokens {tokens}")
        for name, seen in (("get", store.get(key, PAGE).outcome.token), ("stat", store.stat(key).token)):
            check(seen in (None, tokens[-1]), f"{name} says token {seen}, put said {tokens[-1]}")
        if self.bench.capabilities.scan:
            listed = [entry.token for entry in store.scan()]
            check(listed in ([None], tokens[-1:]), f"a scan says tokens {listed}, put said {tokens[-1]}")

    def test_lost_events_in_any_order_never_hide_a_newer_copy(self) -> None:
        """A loss told late, or of the wrong copy, makes the core forget what is there and store it again."""
        self.bench.require_medium("file", "network", why=_NOBODY_ELSE)
        place = self.bench.place()
        store, (key, value) = self.bench.open(place), self.some_values(1)[0]
        newest = None
        for version in range(1, 4):
            content = value_of(key, version, len(value))
            newest = store.put(key, content).token
            if version < 3:
                Reach(self.bench, place).raw_delete(key)
                store.get(key, len(value))
        store.get(key, len(value))
        told = [token for lost, token in store.host.lost_copies if lost == key]
        if not told and newest is None:
            raise NotApplicable(
                "the backend tells no losses and gives no tokens, so there is no order to mix up"
            )
        for order in itertools.permutations(told):
            for token in order:
                hides = newest is None or token is None or token >= newest
                check(not hides, f"the loss of copy {token} is told, and copy {newest} is there")
        self.holds(store, key, value_of(key, 3, len(value)), "the newest copy")

    # -- what these properties share -------------------------------------------------------------

    def _small(self) -> tuple[Place, Store]:
        """A store that evicts by itself at `small_capacity_bytes`."""
        place = self.bench.place(small=True)
        return place, self.bench.open(place, capacity_bytes=self.bench.harness.small_capacity_bytes)

    def _put(self, store: Store, key: StorageKey, value: bytes) -> None:
        """Puts into a full store that evicts by itself: it may refuse for a moment, while it frees memory."""
        self.put(store, key, value, full_for_s=self.bench.harness.slack_s)

    def _filling(self) -> Iterator[tuple[StorageKey, bytes]]:
        """Values without end, of which about `_VALUES_TO_FILL` fill a small store."""
        pages = max(self.bench.harness.small_capacity_bytes // _VALUES_TO_FILL // PAGE, 1)
        for n in itertools.count():
            key = key_named(f"filling {n}")
            yield key, value_of(key, 1, self.bench.fit(pages))

    @staticmethod
    def _pin(store: Store, keys: Sequence[StorageKey], ttl_s: float) -> list[str]:
        """Pins them, and tells how each ended."""
        outcomes = store.call(len(keys), lambda call: store.backend.pin_many(keys, ttl_s, call))
        return [outcome.status.name for outcome in outcomes]

    def _check_evicted(self, missing: int) -> None:
        if not missing:
            raise Unproven(
                "the store evicted nothing: harness hook `small_config` is missing, or small_capacity_bytes "
                "is less than what such a store keeps"
            )
