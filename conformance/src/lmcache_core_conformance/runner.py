"""The library call: runs the properties on one backend and reports, without pytest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lmcache_core_conformance.figures import Figure
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.properties import Group, Property
from lmcache_core_conformance.suite import GROUPS, PROPERTIES, execute
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, Verdict


@dataclass(frozen=True, slots=True)
class Result:
    """What one property said. `reason` is empty when it passed; `figures` is what it measured."""

    prop: Property
    verdict: Verdict
    reason: str
    seconds: float
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run, in the suite's order. `started` is Unix time."""

    results: tuple[Result, ...]
    started: float
    seconds: float

    def of(self, verdict: Verdict) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.verdict is verdict)

    @property
    def failed(self) -> bool:
        return bool(self.of(Verdict.FAILED))


def run(
    harness: Harness,
    *,
    groups: Collection[str] | None = None,
    properties: Collection[str] | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Runs every property, or only those of `groups` or named in `properties`.

    `on_result` is called after each one. Never raises for the backend's sake.

    Raises:
        ValueError: a group or property is not known.
    """
    known_groups = {group.group for group in GROUPS}
    for unknown in sorted(set(groups or ()) - known_groups):
        raise ValueError(f"no group {unknown!r}; there are {', '.join(sorted(known_groups))}")
    for unknown in sorted(set(properties or ()) - {prop.name for prop in PROPERTIES}):
        raise ValueError(f"no property {unknown!r}")
    started, clock = time.time(), time.monotonic()
    results = []
    for prop in PROPERTIES:
        if groups is not None and prop.group not in groups:
            continue
        if properties is not None and prop.name not in properties:
            continue
        result = _run_one(harness, prop)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return Report(tuple(results), started, time.monotonic() - clock)


def _run_one(harness: Harness, prop: Property) -> Result:
    group: type[Group] = next(group for group in GROUPS if group.group == prop.group)
    deviation = next((d for d in harness.deviations if d.property_name == prop.name), None)
    started = time.monotonic()
    figures: list[Figure] = []
    verdict, reason = _verdict(group(), prop, harness, figures.append)
    if deviation is not None and verdict is Verdict.FAILED:
        verdict, reason = Verdict.DEVIATION, deviation.reason
    elif deviation is not None and verdict is Verdict.PASSED:
        verdict, reason = Verdict.FAILED, f"passes, but is listed as a deviation: {deviation.reason}"
    return Result(prop, verdict, reason, time.monotonic() - started, tuple(figures))


def _verdict(
    instance: Group, prop: Property, harness: Harness, on_figure: Callable[[Figure], None]
) -> tuple[Verdict, str]:
    try:
        execute(instance, prop, harness, on_figure)
    except NotApplicable as reason:
        return Verdict.NOT_APPLICABLE, str(reason)
    except Unproven as reason:
        return Verdict.UNPROVEN, str(reason)
    except AssertionError as violation:
        return Verdict.FAILED, str(violation)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (recorded boundary: foreign code; sys.exit() is no pass)
        return Verdict.FAILED, f"{type(error).__name__}: {error}"
    return Verdict.PASSED, ""
