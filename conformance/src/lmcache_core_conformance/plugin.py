"""The pytest plugin: runs the properties of BackendConformance subclasses and reports their verdicts.

Besides passed and failed there are `unproven` (a harness hook is missing) and `not applicable` (a
capability makes the property meaningless). Nothing else excuses a property: no skip, no xfail, no
override; deviations are listed in the harness, and are strict. So the suite runs and judges it, as
in the other doors, and pytest is only told: the test class is never called.
"""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmcache_core_conformance.certified import Certified
    from lmcache_core_conformance.harness import Harness
    from lmcache_core_conformance.properties import Property
    from lmcache_core_conformance.runner import Result
    from lmcache_core_conformance.suite import BackendConformance

_EXCUSES = ("skip", "skipif", "xfail")
_VERDICT = "conformance_verdict"
_FIGURE = "conformance_figure"
_JUDGED_OF = "conformance_judged"
_LETTERS = {"unproven": "u", "not applicable": "n"}
_BELOW_FLOOR = "passed (below floor)"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "lmcache-core backend conformance")
    group.addoption(
        "--conformance-strict",
        action="store_true",
        help="count properties that are unproven, for want of a harness hook, as failed",
    )


@dataclass
class _Judged:
    """A property to be judged, and how it was. Taken from the class once, before anything runs."""

    prop: Property
    certified: Certified
    deviation: str | None
    result: Result | None = None

    @property
    def effort(self) -> str:
        """What is to be told of the effort; empty for the suite's default."""
        from lmcache_core_conformance.effort import reduced, words_of

        return words_of(reduced(self.certified.effort))


_JUDGED = pytest.StashKey[_Judged]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Refuses whatever would weaken the suite, once everybody else has had their say."""
    classes = tuple(dict.fromkeys(found[0] for found in map(_property_of, items) if found is not None))
    yield
    _prepare(items)
    if config.getoption("conformance_strict") and not _is_selected(config):
        _check_whole(items, classes)


def _prepare(items: list[pytest.Item]) -> None:
    certified: dict[type[BackendConformance], Certified] = {}
    for item in items:
        found = _property_of(item)
        if found is None:
            continue
        cls, prop = found
        from lmcache_core_conformance.certified import Certified
        from lmcache_core_conformance.deviations import deviations_of
        from lmcache_core_conformance.suite import NAMES, check_subclass

        try:
            check_subclass(cls)
            deviations = deviations_of(cls.harness, NAMES)
            if cls not in certified:
                certified[cls] = Certified(cls.harness)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(str(error)) from error
        excuses = [mark.name for mark in item.iter_markers() if mark.name in _EXCUSES]
        if excuses:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {', '.join(excuses)}: a conformance property is excused only by "
                "Harness.deviations, with a reason"
            )
        item.stash[_JUDGED] = _Judged(prop, certified[cls], deviations.get(prop.name))


def _is_selected(config: pytest.Config) -> bool:
    """Whether whoever runs the tests asked for some of them only."""
    options = ("keyword", "markexpr", "deselect", "lf", "stepwise")
    return any(config.getoption(option, None) for option in options) or any(
        "::" in arg for arg in config.args
    )


def _check_whole(items: list[pytest.Item], classes: tuple[type[BackendConformance], ...]) -> None:
    """
    Raises:
        UsageError: properties of a class were deselected, though nobody asked for a selection.
    """
    from lmcache_core_conformance.suite import NAMES

    for cls in classes:
        left = {found[1].name for found in map(_property_of, items) if found is not None and found[0] is cls}
        if lacking := sorted(NAMES - left):
            raise pytest.UsageError(
                f"{cls.__name__}: {len(lacking)} of {len(NAMES)} properties were deselected, which "
                f"--conformance-strict does not allow: {', '.join(lacking[:3])}{', …' * (len(lacking) > 3)}"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Has a property judged by the suite, instead of calling it."""
    judged = pyfuncitem.stash.get(_JUDGED, None)
    if judged is None:
        return None
    from lmcache_core_conformance.runner import judge
    from lmcache_core_conformance.verdicts import NotApplicable, Unproven, Verdict, Violation

    errors: list[Exception] = []
    excuses = (NotApplicable, Unproven, pytest.exit.Exception, unittest.SkipTest)
    judged.result = result = judge(judged.certified, judged.prop, judged.deviation, errors.append)
    pyfuncitem.user_properties.append((_JUDGED_OF, (pyfuncitem.nodeid.rpartition("::")[0], judged.effort)))
    pyfuncitem.user_properties += [(_FIGURE, str(figure)) for figure in result.figures]
    if result.verdict is Verdict.PASSED:
        return True
    if not errors:
        raise Violation(result.reason)
    if result.verdict is Verdict.FAILED and isinstance(errors[0], excuses):
        raise Violation(result.reason) from errors[0]
    raise errors[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Has pytest say what the suite says, whatever marks and exceptions mean elsewhere."""
    report = yield
    judged = item.stash.get(_JUDGED, None)
    if judged is None:
        return report
    excused = report.outcome == "skipped" or hasattr(report, "wasxfail")
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    if call.when == "call" and judged.result is not None:
        _tell(item, report, judged.result)
    elif call.when == "call" and call.excinfo is None:
        report.outcome, report.longrepr = "failed", "something took the place of the property"
    elif excused:
        report.outcome = "failed"
    if report.outcome == "failed" and call.excinfo is not None and isinstance(report.longrepr, tuple | None):
        reason = judged.result.reason if judged.result is not None else str(call.excinfo.value)
        report.longrepr = f"{reason} (a conformance property can't be skipped)"
    if report.outcome == "failed" and call.when == "call":
        _conceal(report, judged.certified.harness)
    return report


def _conceal(report: pytest.TestReport, harness: Harness) -> None:
    """Takes the secrets of the harness's options out of a failure: logs of CI are read by others."""
    from lmcache_core_conformance.redaction import redactor_for

    redactor = redactor_for(harness)
    text = str(report.longrepr)
    hidden = redactor.conceal(text)
    if hidden != text:
        report.longrepr = hidden
    report.sections = [(name, redactor.conceal(content)) for name, content in report.sections]


def _tell(item: pytest.Item, report: pytest.TestReport, result: Result) -> None:
    """Makes the report of a property's call say what the suite found."""
    from lmcache_core_conformance.verdicts import Verdict

    path, line, _ = item.location
    verdict = result.verdict
    if verdict is Verdict.UNPROVEN and item.config.getoption("conformance_strict"):
        report.outcome, report.longrepr = "failed", f"unproven: {result.reason}"
    elif verdict in (Verdict.UNPROVEN, Verdict.NOT_APPLICABLE):
        report.outcome, report.longrepr = "skipped", (path, line or 0, result.reason)
        setattr(report, _VERDICT, verdict.value)
    elif verdict is Verdict.DEVIATION:
        report.outcome = "skipped"
        report.wasxfail = result.reason
    elif verdict is Verdict.FAILED:
        report.outcome = "failed"
    elif result.below_floor:
        setattr(report, _VERDICT, _BELOW_FLOOR)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    verdict = getattr(report, _VERDICT, None)
    if verdict == _BELOW_FLOOR:
        return verdict, "b", verdict.upper()
    return None if verdict is None else (verdict, _LETTERS[verdict], verdict.upper())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how much was judged, what was measured, and once what is unproven or not applicable, and why."""
    _summarise_effort(terminalreporter)
    figures = [
        f"{report.nodeid.rpartition('::')[0].rpartition('::')[2]}: {text}"
        for outcome in ("passed", _BELOW_FLOOR, "failed")
        for report in terminalreporter.getreports(outcome)
        for name, text in report.user_properties
        if name == _FIGURE
    ]
    if figures:
        terminalreporter.section("conformance: performance")
        for line in figures:
            terminalreporter.write_line(line)
    for verdict in _LETTERS:
        reasons: dict[str, list[str]] = {}
        for report in terminalreporter.stats.get(verdict, []):
            reasons.setdefault(report.longrepr[2], []).append(report.nodeid.split("::", 1)[-1])
        if not reasons:
            continue
        terminalreporter.section(f"conformance: {verdict}")
        for reason, names in sorted(reasons.items()):
            terminalreporter.write_line(f"{reason}:")
            for name in names:
                terminalreporter.write_line(f"    {name}")


def _summarise_effort(terminalreporter: pytest.TerminalReporter) -> None:
    judged = Counter(
        tuple(told)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, told in report.user_properties
        if name == _JUDGED_OF
    )
    if not judged:
        return
    from lmcache_core_conformance.suite import NAMES

    terminalreporter.section("conformance")
    for (where, effort), number in sorted(judged.items()):
        words = ", ".join(filter(None, [f"{number} of {len(NAMES)} properties judged", effort]))
        terminalreporter.write_line(f"{where}: {words}")


def _property_of(item: pytest.Item) -> tuple[type[BackendConformance], Property] | None:
    """The class and property of a conformance test, or None for every other test."""
    cls = getattr(item, "cls", None)
    if cls is None or not isinstance(item, pytest.Function):
        return None
    from lmcache_core_conformance.suite import BackendConformance, find

    if not issubclass(cls, BackendConformance):
        return None
    prop = find(item.originalname)
    return None if prop is None else (cls, prop)
