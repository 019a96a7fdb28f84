"""Rules for every test of the repository."""

from __future__ import annotations

import os
from collections.abc import Generator

import pluggy
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers use every core: more threads only wait

MOST_WORKERS = 8
LONGEST = (
    "conformance/tests/test_matrix.py",
    "tests/integration/test_transformers_demo.py",
    "tests/integration/test_docs_publish.py",
    "plugins/redis/tests/test_conformance_tls.py",
    "plugins/redis/tests/test_conformance.py",
    "plugins/disk/tests/test_conformance.py",
    "plugins/redis/tests/test_conformance_cluster.py",
    "plugins/redis/tests/test_conformance_valkey.py",
    "kernels/tests/test_packaging.py",
    "tests/faults/test_engine_interrupts.py",
    "plugins/cpu/tests/test_conformance.py",
    "tests/integration/test_docs_how_to.py",
    "plugins/redis/tests/test_demo.py",
    "conformance/tests/test_hooks.py",
    "kernels/tests/test_sanitized.py",
)
"""What takes a third of a minute or more is begun first, so that no worker is left with it at the end."""

_skipped: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers `-n auto` means: none for a part of the suite, which is sooner done without.

    For all of it one more than there are cores, since many tests wait.
    """
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    chosen = chosen or any(
        config.getoption(option, None) for option in ("keyword", "markexpr", "lf", "stepwise")
    )
    return 0 if chosen else min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    outcome = yield
    outcome.get_result().needs_gpu = item.get_closest_marker("gpu") is not None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    verdict = getattr(report, "conformance_verdict", "")  # set by the conformance suite on its own properties
    gpu = getattr(report, "needs_gpu", False)  # keywords would also have the names of directories
    allowed = hasattr(report, "wasxfail") or gpu or verdict == "not applicable"
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
