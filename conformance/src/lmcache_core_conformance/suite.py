"""The suite: every group in one base class, which a plugin subclasses and can't weaken."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.certified import Certified
from lmcache_core_conformance.crash import end_child
from lmcache_core_conformance.figures import Figure
from lmcache_core_conformance.groups.batching import Batching
from lmcache_core_conformance.groups.capacity import Capacity
from lmcache_core_conformance.groups.concurrency import Concurrency
from lmcache_core_conformance.groups.configuration import Configuration
from lmcache_core_conformance.groups.corruption import Corruption
from lmcache_core_conformance.groups.crash import Crash
from lmcache_core_conformance.groups.deadline import Deadline
from lmcache_core_conformance.groups.declaration import Declaration
from lmcache_core_conformance.groups.destination import Destination
from lmcache_core_conformance.groups.endurance import Endurance
from lmcache_core_conformance.groups.faults import Faults
from lmcache_core_conformance.groups.honesty import Honesty
from lmcache_core_conformance.groups.lifecycle import Lifecycle
from lmcache_core_conformance.groups.ownership import Ownership
from lmcache_core_conformance.groups.performance import Performance
from lmcache_core_conformance.groups.resident import Residents
from lmcache_core_conformance.groups.retention import Retention
from lmcache_core_conformance.groups.round_trip import RoundTrip
from lmcache_core_conformance.groups.sharing import Sharing
from lmcache_core_conformance.groups.sizes import Sizes
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.properties import Group, Property, properties_of
from lmcache_core_conformance.watch import Hung, bounded, not_ended_from_within

GROUPS: tuple[type[Group], ...] = (
    Declaration,
    RoundTrip,
    Sizes,
    Batching,
    Destination,
    Ownership,
    Concurrency,
    Lifecycle,
    Honesty,
    Residents,
    Capacity,
    Endurance,
    Retention,
    Sharing,
    Deadline,
    Faults,
    Corruption,
    Configuration,
    Crash,
    Performance,
)
PROPERTIES: tuple[Property, ...] = tuple(prop for group in GROUPS for prop in properties_of(group))
NAMES = frozenset(prop.name for prop in PROPERTIES)
_GROUP_OF = {group.group: group for group in GROUPS}


class BackendConformance(
    Declaration,
    RoundTrip,
    Sizes,
    Batching,
    Destination,
    Ownership,
    Concurrency,
    Lifecycle,
    Honesty,
    Residents,
    Capacity,
    Endurance,
    Retention,
    Sharing,
    Deadline,
    Faults,
    Corruption,
    Configuration,
    Crash,
    Performance,
):
    """Certifies one backend: subclass it in a test module as `Test…` with a `harness`.

        class TestMine(BackendConformance):
            harness = MyHarness()

    It names the standard properties and their harness, and no more: each is run by the suite on a group of
    its own, so that nothing here, in a fixture or on an instance changes one. A subclass may add tests.

    Raises:
        TypeError: on subclassing, when `harness` is missing, or a standard test or helper is replaced.
    """

    group = "all"
    harness: ClassVar[Harness]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_subclass(cls)


def check_subclass(cls: type[BackendConformance]) -> None:
    """
    Raises:
        TypeError: as `BackendConformance` says.
    """
    harness = getattr(cls, "harness", None)
    if not isinstance(harness, Harness):
        raise TypeError(f"{cls.__name__}.harness must be an instance of a Harness subclass, not {harness!r}")
    for group in GROUPS:
        for name in vars(group):
            if name.startswith("__") or name == "group":
                continue
            if getattr(cls, name) is not getattr(group, name):
                raise TypeError(
                    f"{cls.__name__} replaces {name}, which belongs to the conformance suite; "
                    "a property that can't be kept is listed in Harness.deviations with its reason"
                )
    for name in vars(Group):
        if not name.startswith("__") and name != "group" and getattr(cls, name) is not getattr(Group, name):
            raise TypeError(f"{cls.__name__} replaces {name}, which belongs to the conformance suite")


def find(name: str) -> Property | None:
    """The property of that name."""
    return next((prop for prop in PROPERTIES if prop.name == name), None)


def execute(prop: Property, certified: Certified, on_figure: Callable[[Figure], None]) -> None:
    """Runs one property on a bench of its own, bounded in time. `on_figure` gets what it measured.

    Raises:
        Violation: the property does not hold, or the class was changed before or meanwhile.
        NotApplicable: a capability makes it meaningless.
        Unproven: a harness hook is missing.
        Exception: whatever the backend raised where it may not.
        KeyboardInterrupt: interrupted; the stores are closed and their directories removed.
    """
    benches: list[Bench] = []

    def work() -> None:
        certified.check_unchanged()
        bench = Bench(certified.harness, on_figure, certified.backend)
        benches.append(bench)
        group = _GROUP_OF[prop.group]()
        group.bench = bench
        try:
            if prop.group != Declaration.group:
                bench.check_declared()
            for capability in prop.needs:
                bench.require(capability)
            getattr(group, prop.name)()
            bench.check_built()
            certified.check_unchanged()
        finally:
            bench.close()

    try:
        with not_ended_from_within():
            bounded(work, certified.harness.limit_s)
    except (Hung, KeyboardInterrupt):
        end_child()
        raise
    finally:
        for bench in benches:
            bench.abandon()
