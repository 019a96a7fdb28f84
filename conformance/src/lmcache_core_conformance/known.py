"""What was found out once about a harness, which may be of any class: equal to others, or unhashable."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

from lmcache_core_conformance.harness import Harness

V = TypeVar("V")


class Known(Generic[V]):
    """A value for each harness, by identity, for as long as the harness lives."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[ref[Harness], V]] = {}

    def get(self, harness: Harness) -> V | None:
        found = self._values.get(id(harness))
        return found[1] if found is not None and found[0]() is harness else None

    def keep(self, harness: Harness, value: V) -> V:
        place = id(harness)
        self._values[place] = (ref(harness, lambda gone: self._forget(place, gone)), value)
        return value

    def _forget(self, place: int, gone: ref[Harness]) -> None:
        if place in self._values and self._values[place][0] is gone:  # else it is another's by now
            del self._values[place]
