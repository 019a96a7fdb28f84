"""Rules for every test of the repository."""

from __future__ import annotations

import os

import pytest

_skipped: list[str] = []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    verdict = getattr(report, "conformance_verdict", "")  # set by the conformance suite on its own properties
    allowed = hasattr(report, "wasxfail") or "gpu" in report.keywords or verdict == "not applicable"
    if report.skipped and not allowed:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skip is a failure, unless the test asks for an accelerator."""
    if os.environ.get("CI") == "true" and _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped and os.environ.get("CI") == "true":
        terminalreporter.section("skips that CI does not allow", red=True)
        for nodeid in _skipped:
            terminalreporter.line(nodeid)
