"""A random life of one store, compared step by step with an oracle that knows nothing of any backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, configuration, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Capabilities, Outcome, Status
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.driver import Store, Want
from lmcache_core_conformance.timing import affordable
from lmcache_core_conformance.values import PAGE, difference, key_named, value_of
from lmcache_core_conformance.verdicts import Unproven, check

_STEPS = 30
_CALLS_A_STEP = 2
_KEYS = 3
_WHICH = st.integers(0, _KEYS - 1)
_PAGES = st.sampled_from([1, 2, 3, 5, 9, 0, 0])
_LARGE = 0.4
"""What part of the bound a large value takes: three of them don't fit."""


def live(bench: Bench) -> None:
    """Runs `Harness.examples` random lives.

    Raises:
        Violation: the store said something that the oracle can't explain.
    """
    offered = bench.capabilities
    examples = affordable(bench, bench.harness.examples, _STEPS * _CALLS_A_STEP)

    class Life(_Life):
        def __init__(self) -> None:
            super().__init__(bench, offered)

    with _files_in(bench.directory):
        run_state_machine_as_test(
            Life,
            settings=settings(
                max_examples=examples,
                stateful_step_count=_STEPS,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )


@contextlib.contextmanager
def _files_in(directory: Path) -> Iterator[None]:
    """While inside, hypothesis keeps what it learns of the code there, not in the user's directory."""
    before = getattr(configuration, "__hypothesis_home_directory", None)
    configuration.set_hypothesis_home_dir(directory / "hypothesis")
    try:
        yield
    finally:
        configuration.set_hypothesis_home_dir(before)


class _Life(RuleBasedStateMachine):
    """The oracle is a dictionary: what each key must hold, given what was answered.

    It allows FULL only when the bound is in sight, and in a store that evicts by itself a miss for what
    was there; then the key stays a miss until it is put again.
    """

    def __init__(self, bench: Bench, offered: Capabilities) -> None:
        super().__init__()
        self.bench = bench
        self.bound = bench.harness.small_capacity_bytes
        self.offered = offered
        self.values: dict[StorageKey, bytes] = {}
        self.version = 0
        self.may_vanish = self.offered.self_evicting
        self.can_remove = self.offered.medium != "memory"

    @initialize()
    def begin(self) -> None:
        self.place = self.bench.place(small=True)
        self.store: Store = self.bench.open(self.place, capacity_bytes=self.bound)

    @rule(which=_WHICH, pages=_PAGES)
    def put(self, which: int, pages: int) -> None:
        key, value = self._new(which, pages)
        self._stored(self.store.put(key, value), key, value)

    @rule(first=_WHICH, second=_WHICH, pages=_PAGES)
    def put_two(self, first: int, second: int, pages: int) -> None:
        values = [self._new(first, pages), self._new(second, 2)][: self.offered.max_batch]
        outcomes = self.store.put_many(values)
        for outcome, (key, value) in zip(outcomes, values, strict=True):
            self._stored(outcome, key, value)
        twice = len(values) == 2 and first == second
        if twice and all(outcome.status is Status.OK for outcome in outcomes):  # either of them may win
            self._settle_on_one_of(*values)

    @rule(which=_WHICH)
    def get(self, which: int) -> None:
        key = self._key(which)
        self._judge(key, *self._get(key, self._room()))

    @rule(which=_WHICH)
    def get_into_too_little(self, which: int) -> None:
        # No precondition on what is there: where the store evicts, it may be other values the next time.
        large = sorted(key for key, value in self.values.items() if len(value) > PAGE)
        if not large:
            return
        key = large[which % len(large)]
        value = self.values[key]
        outcome, _ = self._get(key, len(value) - PAGE)
        if not self._vanished(key, outcome):
            small = outcome.status is Status.TOO_SMALL and outcome.nbytes == len(value)
            check(small, f"get into too little: {outcome.status.name} with {outcome.nbytes} bytes")

    @invariant()
    def every_stat_agrees(self) -> None:
        keys = [self._key(which) for which in range(min(_KEYS, self.offered.max_batch or _KEYS))]
        for key, outcome in zip(keys, self.store.stat_many(keys), strict=True):
            value = self.values.get(key)
            if value is None:
                check(outcome.status is Status.MISS, f"stat of an absent key: {outcome.status.name}")
            elif not self._vanished(key, outcome):
                known = outcome.status is Status.OK and outcome.nbytes == len(value)
                check(known, f"stat: {outcome.status.name} with {outcome.nbytes} bytes, due are {len(value)}")

    @precondition(lambda self: self.offered.delete)
    @rule(which=_WHICH)
    def delete(self, which: int) -> None:
        key = self._key(which)
        outcome = self.store.delete(key)
        if key in self.values and not self._vanished(key, outcome):
            check(outcome.status is Status.OK, f"delete of a stored key: {outcome.status.name}")
            del self.values[key]
        elif key not in self.values:
            check(outcome.status is Status.MISS, f"delete of an absent key: {outcome.status.name}")

    @precondition(lambda self: self.offered.scan)
    @rule()
    def scan(self) -> None:
        found = {entry.key: entry.nbytes for entry in self.store.scan(limit=3)}
        due = {key: len(value) for key, value in self.values.items()}
        extra = {key for key in found if found[key] != due.get(key)}
        check(not extra, f"a scan lists {len(extra)} keys that aren't there, or with other lengths")
        check(self.may_vanish or found == due, f"a scan lists {len(found)} of {len(due)} keys")

    @precondition(lambda self: self.offered.persistent)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.bench.open(self.place, capacity_bytes=self.bound)

    @precondition(lambda self: self.can_remove)
    @rule(which=_WHICH)
    def remove_behind_its_back(self, which: int) -> None:
        if not self.values:
            return
        key = sorted(self.values)[which % len(self.values)]
        try:
            self.bench.harness.raw_delete(self.place.directory, key)
        except Unproven:
            self.can_remove = False  # proved, or not, by the property that needs the hook
            return
        length = len(self.values.pop(key))
        self._judge(key, *self._get(key, length))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for which in range(_KEYS):
                self.get(which)
            used = self.store.stats().used_bytes
            check(used <= self.bound, f"stats says {used} bytes are used under a bound of {self.bound}")
            self.store.close()

    # -- the oracle ------------------------------------------------------------------------------

    def _stored(self, outcome: Outcome, key: StorageKey, value: bytes) -> None:
        if outcome.status is Status.OK:
            self.values[key] = value
            return
        check(outcome.status is Status.FULL, f"put: {outcome.status.name} ({outcome.error})")
        used = sum(map(len, self.values.values())) + 2 * len(value)
        check(used > self.bound // 3, f"FULL with {used} bytes of small_capacity_bytes ({self.bound}) in use")

    def _settle_on_one_of(self, *values: tuple[StorageKey, bytes]) -> None:
        key = values[0][0]
        outcome, seen = self._get(key, self._room())
        if outcome.status is Status.OK and seen in (value for _, value in values):
            self.values[key] = seen
        else:
            self._judge(key, outcome, seen)

    def _judge(self, key: StorageKey, outcome: Outcome, seen: bytes) -> None:
        value = self.values.get(key)
        if value is None:
            check(outcome.status is Status.MISS, f"get of an absent key: {outcome.status.name}")
        elif not self._vanished(key, outcome):
            check(
                outcome.status is Status.OK, f"get of a stored key: {outcome.status.name} ({outcome.error})"
            )
            check(seen == value, f"get: {difference(value, seen)}")

    def _vanished(self, key: StorageKey, outcome: Outcome) -> bool:
        """Whether the store evicted the key by itself: from now on it is absent."""
        vanished = self.may_vanish and outcome.status is Status.MISS
        if vanished:
            del self.values[key]
        return vanished

    # -- what the steps share --------------------------------------------------------------------

    def _get(self, key: StorageKey, nbytes: int) -> tuple[Outcome, bytes]:
        got = self.store.get_many([Want(key, (nbytes,))])[0]
        return got.outcome, got.value

    def _new(self, which: int, pages: int) -> tuple[StorageKey, bytes]:
        """A new version of a key; 0 pages stand for a large value."""
        self.version += 1
        key: Any = self._key(which)
        nbytes = self.bench.fit(pages) if pages else self._room() - PAGE
        return key, value_of(key, self.version, nbytes)

    def _key(self, which: int) -> StorageKey:
        return key_named(f"life-{which}")

    def _room(self) -> int:
        """Views for every value: those of a large one, and a page."""
        return self.bench.fit(int(_LARGE * self.bound) // PAGE) + PAGE
