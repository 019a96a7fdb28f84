"""The library call: runs the properties on one backend and reports, without pytest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lmcache_core.storage.contract import Backend
from lmcache_core_conformance.certified import Certified
from lmcache_core_conformance.deviations import deviations_of
from lmcache_core_conformance.figures import Figure
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.properties import Property
from lmcache_core_conformance.suite import GROUPS, NAMES, PROPERTIES, execute
from lmcache_core_conformance.verdicts import Verdict, verdict_of


@dataclass(frozen=True, slots=True)
class Result:
    """What one property said. `reason` is empty when it passed; `figures` is what it measured."""

    prop: Property
    verdict: Verdict
    reason: str
    seconds: float
    figures: tuple[Figure, ...] = ()

    @property
    def below_floor(self) -> bool:
        """Whether it passed only because floors weren't enforced."""
        return self.verdict is Verdict.PASSED and any(figure.below_floor for figure in self.figures)


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run, in the suite's order. `started` is Unix time.

    `backend` is the class that was certified.

    Of an interrupted run they are those of the properties that had been judged by then.
    """

    results: tuple[Result, ...]
    started: float
    seconds: float
    backend: type[Backend[Any]]
    interrupted: bool = False

    def of(self, verdict: Verdict) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.verdict is verdict)

    @property
    def failed(self) -> bool:
        return bool(self.of(Verdict.FAILED))


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; `report` says what had been run before."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"interrupted after {len(report.results)} properties")
        self.report = report


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
        ValueError: a group or property is not known, or a deviation or number of the harness is not what it
            should be.
        TypeError: a deviation or number is not even that.
        Interrupted: by Ctrl-C; what the property under way had opened is closed and removed.
    """
    known_groups = {group.group for group in GROUPS}
    for unknown in sorted(set(groups or ()) - known_groups):
        raise ValueError(f"no group {unknown!r}; there are {', '.join(sorted(known_groups))}")
    for unknown in sorted(set(properties or ()) - NAMES):
        raise ValueError(f"no property {unknown!r}")
    deviations = deviations_of(harness, NAMES)
    certified = Certified(harness)
    started, clock = time.time(), time.monotonic()
    results: list[Result] = []

    def report(*, interrupted: bool) -> Report:
        return Report(tuple(results), started, time.monotonic() - clock, certified.backend, interrupted)

    try:
        for prop in PROPERTIES:
            if groups is not None and prop.group not in groups:
                continue
            if properties is not None and prop.name not in properties:
                continue
            results.append(judge(certified, prop, deviations.get(prop.name)))
            if on_result is not None:
                on_result(results[-1])
    except KeyboardInterrupt as error:
        raise Interrupted(report(interrupted=True)) from error
    return report(interrupted=False)


def judge(
    certified: Certified,
    prop: Property,
    deviation: str | None,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> Result:
    """Runs one property; `deviation` is the reason why it is expected to fail.

    `on_error` gets what ended it, with the traceback that the result lacks.
    """
    started = time.monotonic()
    figures: list[Figure] = []
    verdict, reason = Verdict.PASSED, ""
    try:
        execute(prop, certified, figures.append)
    except Exception as error:  # noqa: BLE001 (recorded boundary: the backend is foreign code)
        verdict, reason = verdict_of(error, certified.harness)
        on_error(error)
    if deviation is not None and verdict is Verdict.FAILED:
        verdict, reason = Verdict.DEVIATION, deviation
    elif deviation is not None and verdict is Verdict.PASSED:
        verdict, reason = Verdict.FAILED, f"passes, but is listed as a deviation: {deviation}"
    return Result(prop, verdict, reason, time.monotonic() - started, tuple(figures))
