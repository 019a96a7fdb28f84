"""The three doors: the base class under pytest, the command, and the library call."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance_backends.broken_conduct import CountsAttempts
from conformance_backends.harness import SmallHarness, judged_hanging
from conformance_backends.memory import MemoryBackend
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Item
from lmcache_core_conformance import PROPERTIES, BackendConformance, Deviation, Verdict, run

ROUND_TRIP = "test_a_value_comes_back_byte_for_byte"
STATS = "test_stats_count_what_is_stored"
MODULE = """
import pytest
from conformance_backends.broken_conduct import CountsAttempts
from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core_conformance import BackendConformance, Deviation, Harness
"""


def collect_and_run(pytester: pytest.Pytester, code: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(MODULE + code)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


class Hanging(MemoryBackend):
    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        threading.Event().wait()


def test_a_subclass_with_a_harness_runs_every_property_and_skips_none(pytester: pytest.Pytester) -> None:
    code = "class TestMine(BackendConformance):\n    harness = SmallHarness(MemoryBackend)\n"
    result = collect_and_run(pytester, code, "-k", "round or persist or reopen or byte_for_byte")
    counts = result.parseoutcomes()
    assert counts["passed"] >= 1
    assert "skipped" not in counts
    result.stdout.fnmatch_lines(["*conformance: not applicable*", "capability persistent is False:"])


def test_replacing_a_standard_test_is_an_error() -> None:
    with pytest.raises(TypeError, match="replaces test_a_value_comes_back"):
        type(
            "TestMine",
            (BackendConformance,),
            {"harness": SmallHarness(MemoryBackend), ROUND_TRIP: lambda self: None},
        )


def test_replacing_what_standard_tests_are_built_of_is_an_error() -> None:
    with pytest.raises(TypeError, match="replaces holds"):
        type(
            "TestMine",
            (BackendConformance,),
            {"harness": SmallHarness(MemoryBackend), "holds": lambda self, *rest: None},
        )


def test_a_subclass_without_a_harness_is_an_error() -> None:
    with pytest.raises(TypeError, match="harness must be an instance"):
        type("TestMine", (BackendConformance,), {})


@pytest.mark.parametrize("mark", ["skip", "xfail"])
def test_marking_a_standard_test_is_refused(pytester: pytest.Pytester, mark: str) -> None:
    code = (
        f"@pytest.mark.{mark}(reason='not today')\n"
        "class TestMine(BackendConformance):\n    harness = SmallHarness(MemoryBackend)\n"
    )
    result = collect_and_run(pytester, code)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*is marked {mark}*"])


def test_skipping_from_a_fixture_counts_as_failed(pytester: pytest.Pytester) -> None:
    code = """
class TestMine(BackendConformance):
    harness = SmallHarness(MemoryBackend)

    @pytest.fixture(autouse=True)
    def not_today(self):
        pytest.skip("not today")
"""
    result = collect_and_run(pytester, code, "-k", "byte_for_byte")
    assert "passed" not in result.parseoutcomes()
    assert "skipped" not in result.parseoutcomes()
    assert result.ret == pytest.ExitCode.TESTS_FAILED


DEVIATING = """
class MyHarness(SmallHarness):
    deviations = (Deviation("test_stats_count_what_is_stored", "counts attempts"),)

class TestMine(BackendConformance):
    harness = MyHarness({backend})
"""


def test_a_listed_deviation_is_an_expected_failure(pytester: pytest.Pytester) -> None:
    result = collect_and_run(pytester, DEVIATING.format(backend="CountsAttempts"), "-k", "stats_count")
    result.assert_outcomes(xfailed=1)


def test_a_listed_deviation_that_passes_is_a_failure(pytester: pytest.Pytester) -> None:
    result = collect_and_run(pytester, DEVIATING.format(backend="MemoryBackend"), "-k", "stats_count")
    result.assert_outcomes(failed=1)


UNPROVEN = """
class MyHarness(Harness):
    backend = FileBackend

    def fresh_config(self, tmp):
        return {"path": str(tmp)}

class TestMine(BackendConformance):
    harness = MyHarness()
"""


def test_a_property_without_its_hook_is_unproven_and_fails_when_strict(pytester: pytest.Pytester) -> None:
    result = collect_and_run(pytester, UNPROVEN, "-k", "failed_open")
    counts = result.parseoutcomes()
    assert (counts.get("unproven"), counts.get("passed"), counts.get("skipped")) == (1, None, None)
    result.stdout.fnmatch_lines(["harness hook `unopenable_config` is missing:"])
    strict = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-k", "failed_open", "--conformance-strict"
    )
    strict.assert_outcomes(failed=1)


PLAIN = "class TestMine(BackendConformance):\n    harness = SmallHarness(MemoryBackend)\n"
DESELECTS = """
def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not ({condition})]
"""


def test_the_summary_says_how_many_properties_were_judged_and_with_what_effort(
    pytester: pytest.Pytester,
) -> None:
    result = collect_and_run(pytester, PLAIN, "-k", "byte_for_byte")
    line = f"*::TestMine: 1 of {len(PROPERTIES)} properties judged, effort reduced: capacity_bytes, *rounds*"
    result.stdout.fnmatch_lines([line])


@pytest.mark.parametrize("condition", [f"{ROUND_TRIP!r} in item.name", "True"], ids=["one", "all"])
def test_strictness_allows_no_deselection_that_nobody_asked_for(
    pytester: pytest.Pytester, condition: str
) -> None:
    pytester.makeconftest(DESELECTS.format(condition=condition))
    result = collect_and_run(pytester, PLAIN, "--conformance-strict")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*TestMine: * of {len(PROPERTIES)} properties were deselected*"])
    asked = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "--conformance-strict", "-k", "absent_key_is_a_miss"
    )
    assert asked.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def test_a_backend_that_hangs_fails_and_is_shown_where() -> None:
    name = "test_stat_tells_the_length_that_get_returns"
    result = judged_hanging(SmallHarness(Hanging), name, "stat_many")
    assert result.verdict is Verdict.FAILED
    assert "stat_many" in result.reason


def test_the_library_call_knows_deviations_too() -> None:
    harness = SmallHarness(CountsAttempts)
    harness.deviations = (Deviation(STATS, "counts attempts"),)
    assert run(harness, properties=[STATS]).results[0].verdict is Verdict.DEVIATION
    harness = SmallHarness(MemoryBackend)
    harness.deviations = (Deviation(STATS, "counts attempts"),)
    assert run(harness, properties=[STATS]).results[0].verdict is Verdict.FAILED


SLOW = """
from conformance_backends.broken_performance import ReadsInTinyPieces

class TestMine(BackendConformance):
    harness = SmallHarness(ReadsInTinyPieces)
"""


def test_a_property_below_its_floor_does_not_count_as_passed_under_pytest(pytester: pytest.Pytester) -> None:
    result = collect_and_run(pytester, SLOW, "-k", "reading_keeps_up", "-v")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["*PASSED (BELOW FLOOR)*", "*conformance: performance*", "*below the floor of 0.5"]
    )
    result.stdout.fnmatch_lines(["*1 passed (below floor)*"])


ILL_LISTED: dict[str, tuple[object, type[Exception], str]] = {
    "no reason": ((Deviation(STATS, " "),), ValueError, f"gives no reason for {STATS}"),
    "no property": ((Deviation(STATS[:-2], "x"),), ValueError, f"no property; did you mean '{STATS}'?"),
    "no prefix": ((Deviation(STATS.removeprefix("test_"), "x"),), ValueError, f"did you mean '{STATS}'?"),
    "twice": ((Deviation(STATS, "x"), Deviation(STATS, "y")), ValueError, f"names {STATS} twice"),
    "no deviation": (((STATS, "x"),), TypeError, "which is no Deviation"),
    "no texts": ((Deviation(STATS, 7),), TypeError, "its name and its reason must be texts"),  # type: ignore[arg-type]
    "no list": (Deviation(STATS, "x"), TypeError, "must be a tuple of Deviations"),
}


@pytest.mark.parametrize("how", ILL_LISTED)
def test_ill_listed_deviations_are_an_error_before_anything_runs(how: str) -> None:
    deviations, kind, message = ILL_LISTED[how]
    harness, ran = SmallHarness(Hanging), []
    harness.deviations = deviations  # type: ignore[assignment]
    with pytest.raises(kind, match=re.escape(message)):
        run(harness, properties=[ROUND_TRIP], on_result=ran.append)
    assert not ran


@pytest.mark.parametrize("how", ILL_LISTED)
def test_ill_listed_deviations_are_a_usage_error_under_pytest(pytester: pytest.Pytester, how: str) -> None:
    deviations, _, message = ILL_LISTED[how]
    code = f"""
class MyHarness(SmallHarness):
    deviations = {deviations!r}

class TestMine(BackendConformance):
    harness = MyHarness(MemoryBackend)
"""
    result = collect_and_run(pytester, code)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


NO_EFFORT: dict[str, tuple[str, object, type[Exception], str]] = {
    "nothing": ("rounds", 0, ValueError, "must be positive and finite, not 0"),
    "negative": ("limit_s", -1.0, ValueError, "must be positive and finite, not -1.0"),
    "no number": ("slack_s", math.nan, ValueError, "must be positive and finite, not nan"),
    "endless": ("deadline_s", math.inf, ValueError, "must be positive and finite, not inf"),
    "a text": ("rounds", "x", TypeError, "must be a whole number, not 'x'"),
    "a switch": ("examples", True, TypeError, "must be a whole number, not True"),
    "a fraction": ("crash_points", 2.5, TypeError, "must be a whole number, not 2.5"),
    "none": ("meeting_s", None, TypeError, "must be a number, not None"),
}


@pytest.mark.parametrize("how", NO_EFFORT)
def test_numbers_that_say_no_effort_are_an_error_before_anything_runs(how: str) -> None:
    name, value, kind, message = NO_EFFORT[how]
    harness, ran = SmallHarness(Hanging), list[object]()
    setattr(harness, name, value)
    with pytest.raises(kind, match=re.escape(f"SmallHarness.{name} {message}")):
        run(harness, properties=[ROUND_TRIP], on_result=ran.append)
    assert not ran


def test_numbers_that_say_no_effort_are_a_usage_error_under_pytest(pytester: pytest.Pytester) -> None:
    code = """
class TestMine(BackendConformance):
    harness = SmallHarness(MemoryBackend)
    harness.slack_s = float("nan")
"""
    result = collect_and_run(pytester, code)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "SmallHarness.slack_s must be positive and finite, not nan" in result.stderr.str()


def test_an_unknown_group_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no group 'sises'; there are batching, .*sizes"):
        run(SmallHarness(MemoryBackend), groups=["sises"])


def test_a_backend_that_ends_the_process_fails_the_property_it_was_asked_for() -> None:
    class Exits(MemoryBackend):
        def get_many(self, items: Sequence[Item], call: Call) -> None:
            raise SystemExit(0)

    (result,) = run(SmallHarness(Exits), properties=["test_a_value_comes_back_byte_for_byte"]).results
    assert result.verdict is Verdict.FAILED
    assert "SystemExit" in result.reason


@pytest.mark.parametrize("where", ["the caller's thread", "its own thread"])
def test_a_backend_that_ends_the_process_at_once_fails_too(where: str) -> None:
    class Exits(MemoryBackend):
        def end(self) -> None:
            with contextlib.suppress(SystemExit):
                os._exit(0)

        def get_many(self, items: Sequence[Item], call: Call) -> None:
            if where == "the caller's thread":
                os._exit(0)
            thread = threading.Thread(target=self.end)
            thread.start()
            thread.join()
            super().get_many(items, call)

    ends = os._exit
    (result,) = run(SmallHarness(Exits), properties=[ROUND_TRIP]).results
    assert result.verdict is Verdict.FAILED
    assert result.reason == "os._exit(0) was called, which ends the process without a word"
    assert os._exit is ends


def test_a_process_that_a_backend_forked_may_end_at_once() -> None:
    class Forks(MemoryBackend):
        def get_many(self, items: Sequence[Item], call: Call) -> None:
            child = os.fork()
            if not child:
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            super().get_many(items, call)

    (result,) = run(SmallHarness(Forks), properties=[ROUND_TRIP]).results
    assert (result.verdict, result.reason) == (Verdict.PASSED, "")


def test_the_suite_is_there_where_python_drops_docstrings() -> None:
    program = (
        "from lmcache_core_conformance.suite import GROUPS\n"
        "from lmcache_core_conformance.properties import properties_of\n"
        "print({rule.why for group in GROUPS for rule in properties_of(group)})"
    )
    ran = subprocess.run(
        [sys.executable, "-B", "-OO", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "{'(Python was started with -OO, which drops docstrings)'}\n", ran.stderr


def test_nothing_is_left_in_the_directory_that_a_run_is_started_in(tmp_path: Path) -> None:
    code = (
        "from conformance_backends.harness import SmallHarness\n"
        "from conformance_backends.memory import MemoryBackend\n"
        "from lmcache_core_conformance import run\n"
        "assert not run(SmallHarness(MemoryBackend), groups=['round-trip']).failed\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
