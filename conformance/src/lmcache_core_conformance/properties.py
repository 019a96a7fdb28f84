"""What a property is: a documented test method of a group, with the capabilities that give it meaning."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.driver import Got, Store
from lmcache_core_conformance.values import PAGE, difference, key_named, sealed_frame, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, check

F = TypeVar("F", bound=Callable[..., None])
_PREFIX = "test_"
_NEEDS = "__conformance_needs__"
_NOT_KEPT = "(Python was started with -OO, which drops docstrings)"


def needs(*capabilities: str) -> Callable[[F], F]:
    """Marks a property as meaningless without these capabilities (see `Bench.require`)."""

    def mark(method: F) -> F:
        setattr(method, _NEEDS, capabilities)
        return method

    return mark


@dataclass(frozen=True, slots=True)
class Property:
    """One property: its test's name, its group, why it exists, and the capabilities it needs."""

    name: str
    group: str
    why: str
    needs: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return self.name.removeprefix(_PREFIX).replace("_", " ")


class Group:
    """Base of the groups: the bench, and the checks that most properties share."""

    group: ClassVar[str]
    bench: Bench

    def put(self, store: Store, key: StorageKey, value: bytes, *, full_for_s: float = 0.0) -> None:
        """Puts a value that the backend has no reason to refuse, but for being FULL for `full_for_s`."""
        until = time.monotonic() + full_for_s
        while (outcome := store.put(key, value)).status is Status.FULL and time.monotonic() < until:
            pass
        check(
            outcome.status is Status.OK,
            f"put of {len(value)} bytes under {key} ended {outcome.status.name} ({outcome.error})",
        )

    def check_value(self, got: Got, value: bytes, what: str = "the value") -> None:
        check(got.status is Status.OK, f"get of {what}: {got.status.name} ({got.outcome.error})")
        check(
            got.outcome.nbytes == len(value),
            f"get of {what}: nbytes is {got.outcome.nbytes}, stored were {len(value)}",
        )
        check(got.value == value, f"get of {what}: {difference(value, got.value)}")

    def holds(self, store: Store, key: StorageKey, value: bytes, what: str = "the value") -> None:
        """Checks that the store returns exactly `value`."""
        self.check_value(store.get(key, len(value)), value, what)

    def lacks(self, store: Store, key: StorageKey, nbytes: int, what: str = "an absent key") -> None:
        """Checks that get and stat both miss."""
        got, stat = store.get(key, nbytes), store.stat(key)
        check(got.status is Status.MISS, f"get of {what}: {got.status.name}, due is MISS")
        check(stat.status is Status.MISS, f"stat of {what}: {stat.status.name}, due is MISS")

    def maximum(self) -> int:
        """The declared maximum in whole pages.

        Raises:
            Unproven: it is more than the harness lets the suite allocate.
        """
        maximum = self.bench.capabilities.max_value_bytes or 0
        if maximum > self.bench.harness.large_value_bytes:
            raise Unproven(
                f"the maximum of {maximum} bytes is over the harness's large_value_bytes: "
                "let fresh_config lower the maximum"
            )
        return maximum // PAGE * PAGE

    def range_step(self) -> int:
        """The shortest range that may be asked for, in whole pages.

        Raises:
            NotApplicable: no value is as long as that.
        """
        step = max(-(-self.bench.capabilities.range_min // PAGE), 1) * PAGE
        longest = self.bench.fit(step // PAGE)
        if longest < step:
            raise NotApplicable(f"capability max_value_bytes is {longest}, and range_min is {step}")
        return step

    def segments(self, wanted: Sequence[int], *, spare_pages: int = 0) -> tuple[int, ...]:
        """The first of the segments `wanted` that make a frame within the backend's maximum.

        Raises:
            NotApplicable: a frame with one of them is over it.
        """
        pages = [-(-nbytes // PAGE) for nbytes in wanted]
        room = self.bench.fit(1 + sum(pages) + spare_pages) // PAGE - 1 - spare_pages
        fitting = [n for n in range(1, len(wanted) + 1) if sum(pages[:n]) <= room]
        if not fitting:
            raise NotApplicable(
                f"capability max_value_bytes is {self.bench.capabilities.max_value_bytes}: no frame fits in"
            )
        return tuple(wanted[: fitting[-1]])

    def frame(self, key: StorageKey, version: int) -> bytes:
        """A sealed frame of two segments, or of one where the backend's maximum allows no more."""
        return sealed_frame(key, version, self.segments((PAGE, PAGE)))

    def some_values(self, count: int, pages: int = 2) -> list[tuple[StorageKey, bytes]]:
        """`count` different keys with values of `pages` and more pages."""
        keys = [key_named(f"some-{index}") for index in range(count)]
        return [(key, value_of(key, 1, self.bench.fit(pages + n % 3))) for n, key in enumerate(keys)]


def properties_of(group: type[Group]) -> list[Property]:
    """The properties a group class defines itself, in order.

    Raises:
        TypeError: one has no docstring to say why it exists.
    """
    found = []
    for name, method in vars(group).items():
        if not name.startswith(_PREFIX):
            continue
        why = inspect.getdoc(method) or (_NOT_KEPT if sys.flags.optimize >= 2 else "")
        if not why:
            raise TypeError(f"{group.__name__}.{name} does not say why it exists")
        found.append(Property(name, group.group, why, getattr(method, _NEEDS, ())))
    return found
