"""Who may leave first, against the definition said plainly; and how much is looked at to find out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.identity.keys import StorageKey
from lmcache_core.tiers.ranking import Ranking, Resident

SIZES = (4096, 8192)


class Copies:
    """Copies of a tier, some of them held; counts how often that was asked."""

    def __init__(self) -> None:
        self.here: dict[StorageKey, Resident] = {}
        self.held: set[StorageKey] = set()
        self.num_asked = 0
        self.ranking = Ranking(self.here, self._is_held)

    def add(self, number: int, parent: int | None, nbytes: int = SIZES[0]) -> None:
        above = None if parent is None else key_of(parent)
        copy = Resident(key_of(number), nbytes, nbytes, parent=above)
        self.here[copy.key] = copy
        self.ranking.add(copy)

    def drop(self, number: int) -> None:
        self.ranking.drop(self.here.pop(key_of(number)))

    def hangs_on(self, key: StorageKey, root: StorageKey) -> bool:
        """Whether `key` is `root`, or follows it without a gap."""
        seen: set[StorageKey] = set()
        at: StorageKey | None = key
        while at is not None and at in self.here and at not in seen:
            if at == root:
                return True
            seen.add(at)
            at = self.here[at].parent
        return False

    def family(self, root: StorageKey) -> set[StorageKey]:
        return {key for key in self.here if self.hangs_on(key, root)}

    def coldest(self, nbytes: int) -> set[StorageKey]:
        """The family to leave, as `coldest_family` is defined."""
        ranked = sorted(self.here.values(), key=lambda copy: copy.last_use)
        for copy in ranked:
            if copy.stored == nbytes and not self.family(copy.key) & self.held:
                return self.family(copy.key)
        return set()

    def _is_held(self, copy: Resident) -> bool:
        self.num_asked += 1
        return copy.key in self.held


def key_of(number: int) -> StorageKey:
    return StorageKey(f"c-{number:04}")


@st.composite
def forests(draw: st.DrawFn) -> Copies:
    """Any family tree, with gaps in it, used in any order, any of it held."""
    copies = Copies()
    count = draw(st.integers(1, 12))
    for number in draw(st.permutations(range(count))):
        parent = draw(st.sampled_from([None, *(at for at in range(count) if at != number)]))
        copies.add(number, parent, draw(st.sampled_from(SIZES)))
    for number in draw(st.sets(st.integers(0, count - 1), max_size=count - 1)):
        if draw(st.booleans()):
            copies.drop(number)
        else:
            copies.held.add(key_of(number))
    return copies


@settings(max_examples=150, deadline=None)
@given(forests())
def test_the_coldest_family_is_the_first_in_which_nothing_must_stay(copies: Copies) -> None:
    for nbytes in SIZES:
        found = copies.ranking.coldest_family(nbytes)
        assert {copy.key for copy in found} == copies.coldest(nbytes)
        if found:
            assert found[-1].stored == nbytes


@pytest.mark.parametrize("held", ["all", "the last", "every tenth"])
def test_what_must_stay_of_a_long_prompt_is_looked_at_once(held: str) -> None:
    copies = Copies()
    length = 1000
    for number in range(length):
        copies.add(number, number - 1 if number else None)
    copies.add(length, None)  # newer, and free to go
    numbers = {"all": range(length), "the last": [length - 1], "every tenth": range(9, length, 10)}[held]
    copies.held = {key_of(number) for number in numbers}
    assert [copy.key for copy in copies.ranking.coldest_family(SIZES[0])] == [key_of(length)]
    assert copies.num_asked <= 3 * (length + 1)
