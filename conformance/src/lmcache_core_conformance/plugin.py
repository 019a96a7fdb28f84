"""The pytest plugin: runs the properties of BackendConformance subclasses and reports their verdicts.

Besides passed and failed there are `unproven` (a harness hook is missing) and `not applicable` (a
capability makes the property meaningless). Nothing else excuses a property: no skip, no xfail, no
override; deviations are listed in the harness, and are strict.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmcache_core_conformance.properties import Property
    from lmcache_core_conformance.suite import BackendConformance

_EXCUSES = ("skip", "skipif", "xfail")
_VERDICT = "conformance_verdict"
_FIGURE = "conformance_figure"
_LETTERS = {"unproven": "u", "not applicable": "n"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "lmcache-core backend conformance")
    group.addoption(
        "--conformance-strict",
        action="store_true",
        help="count properties that are unproven, for want of a harness hook, as failed",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses whatever would weaken the suite; marks listed deviations as strict xfails."""
    for item in items:
        found = _property_of(item)
        if found is None:
            continue
        cls, prop = found
        from lmcache_core_conformance.suite import check_subclass

        try:
            check_subclass(cls)
        except TypeError as error:
            raise pytest.UsageError(str(error)) from error
        excuses = [mark.name for mark in item.iter_markers() if mark.name in _EXCUSES]
        if excuses:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {', '.join(excuses)}: a conformance property is excused only by "
                "Harness.deviations, with a reason"
            )
        for deviation in cls.harness.deviations:
            if deviation.property_name == prop.name:
                item.add_marker(pytest.mark.xfail(reason=deviation.reason, strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a property on a bench of its own, bounded in time, instead of calling it."""
    found = _property_of(pyfuncitem)
    if found is None:
        return None
    from lmcache_core_conformance.suite import execute

    cls, prop = found
    figures = pyfuncitem.user_properties
    execute(pyfuncitem.instance, prop, cls.harness, lambda figure: figures.append((_FIGURE, str(figure))))
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is None or _property_of(item) is None:
        return report
    from lmcache_core_conformance.verdicts import NotApplicable, Unproven, Verdict

    path, line, _ = item.location
    if call.excinfo.errisinstance(NotApplicable) or call.excinfo.errisinstance(Unproven):
        unproven = call.excinfo.errisinstance(Unproven)
        if hasattr(report, "wasxfail"):  # a listed deviation can't be shown either
            del report.wasxfail
        if unproven and item.config.getoption("conformance_strict"):
            report.outcome, report.longrepr = "failed", f"unproven: {call.excinfo.value}"
            return report
        verdict = Verdict.UNPROVEN if unproven else Verdict.NOT_APPLICABLE
        report.outcome, report.longrepr = "skipped", (path, line or 0, str(call.excinfo.value))
        setattr(report, _VERDICT, verdict.value)
    elif call.excinfo.errisinstance(pytest.skip.Exception):
        report.outcome = "failed"
        report.longrepr = f"skipped ({call.excinfo.value}): a conformance property can't be skipped"
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    verdict = getattr(report, _VERDICT, None)
    return None if verdict is None else (verdict, _LETTERS[verdict], verdict.upper())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was measured, and once what is unproven or not applicable, and why."""
    figures = [
        f"{report.nodeid.rpartition('::')[0].rpartition('::')[2]}: {text}"
        for outcome in ("passed", "failed")
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
