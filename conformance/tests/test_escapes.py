"""No way out: nothing that a test class, a harness or a backend does excuses a property."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from conformance_backends.broken_network import CallsARefusalAnOutage
from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import BackendStats, Call, Capabilities, Host, Item
from lmcache_core_conformance import Harness, NotApplicable, Unproven, Verdict, run
from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.runner import Result
from lmcache_core_conformance.values import key_named
from lmcache_core_conformance.verdicts import Violation, verdict_of

ROUND_TRIP = "test_a_value_comes_back_byte_for_byte"
OUT_OF_BAND = "test_what_lies_in_the_medium_is_what_was_put"
FAILED_OPEN = "test_close_after_a_failed_open_leaves_nothing"
IMPORTS = """
import unittest
import pytest
from conformance_backends.broken_values import FlipsABit
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core_conformance import BackendConformance, NotApplicable, Unproven
"""
CLASSES = {
    "a test replaced on the instance": """
    harness = SmallHarness(FlipsABit)

    def setup_method(self, method):
        setattr(self, method.__name__, lambda: None)
""",
    "every attribute replaced": """
    harness = SmallHarness(FlipsABit)

    def __getattribute__(self, name):
        return (lambda *a: None) if name.startswith("test_") else object.__getattribute__(self, name)
""",
    "a helper replaced on the instance": """
    harness = SmallHarness(FlipsABit)

    def setup_method(self):
        self.check_value = self.holds = lambda *a, **k: None
""",
    "a test replaced by a fixture": """
    harness = SmallHarness(FlipsABit)

    @pytest.fixture(autouse=True)
    def replaced(self, request):
        setattr(self, request.node.originalname, lambda: None)
        request.node.obj = lambda: None
""",
    "another harness while it runs": """
    harness = SmallHarness(FlipsABit)

    def setup_method(self):
        type(self).harness = SmallHarness(MemoryBackend)
""",
    "a method of the backend replaced by a fixture": """
    harness = SmallHarness(type("Mine", (FlipsABit,), {}))

    @pytest.fixture(autouse=True)
    def repaired(self, monkeypatch):
        monkeypatch.setattr(self.harness.backend, "gather", MemoryBackend.gather)
""",
    "xfail in a fixture": """
    harness = SmallHarness(FlipsABit)

    @pytest.fixture(autouse=True)
    def later(self):
        pytest.xfail("later")
""",
    "xfail in setup": """
    harness = SmallHarness(FlipsABit)

    def setup_method(self):
        pytest.xfail("later")
""",
    "a mark set by a fixture": """
    harness = SmallHarness(FlipsABit)

    @pytest.fixture(autouse=True)
    def marked(self, request):
        request.node.add_marker(pytest.mark.xfail(reason="later"))
""",
    "skip in teardown": """
    harness = SmallHarness(FlipsABit)

    def teardown_method(self):
        pytest.skip("later")
""",
}
RAISED = {
    "pytest.skip": "pytest.skip('no server here')",
    "pytest.xfail": "pytest.xfail('flaky')",
    "pytest.exit": "pytest.exit('enough', 0)",
    "SkipTest": "raise unittest.SkipTest('no server here')",
    "NotApplicable": "raise NotApplicable('not here')",
    "Unproven": "raise Unproven('harness hook `fresh_config` is missing')",
    "SystemExit": "raise SystemExit(0)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
}
CONFTEST = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
EXCUSES: dict[str, Callable[[], BaseException]] = {
    "skip": lambda: pytest.skip.Exception("later"),
    "xfail": lambda: pytest.xfail.Exception("later"),
    "SkipTest": lambda: unittest.SkipTest("later"),
    "NotApplicable": lambda: NotApplicable("capability medium is memory"),
    "Unproven": lambda: Unproven("harness hook `raw_get` is missing"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("later"),
}


def outcomes(pytester: pytest.Pytester, body: str) -> dict[str, int]:
    """What pytest counts for one property of a class with this body."""
    pytester.makepyfile(IMPORTS + body)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", ROUND_TRIP)
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    counts: dict[str, int] = result.parseoutcomes()
    counts.pop("deselected", None)
    return counts


def only(harness: SmallHarness, name: str) -> Result:
    return run(harness, properties=[name]).results[0]


class Excuses(MemoryBackend):
    """Raises an excuse wherever it is asked for a value."""

    excuse: Callable[[], BaseException]

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        raise type(self).excuse()

    def open(self, host: Host) -> Capabilities | None:
        raise type(self).excuse()


class FileHarness(SmallHarness):
    def __init__(self) -> None:
        super().__init__(FileBackend)


@pytest.mark.parametrize("how", CLASSES)
def test_a_test_class_can_not_excuse_a_property(pytester: pytest.Pytester, how: str) -> None:
    counts = outcomes(pytester, f"class TestMine(BackendConformance):{CLASSES[how]}")
    assert set(counts) <= {"failed", "errors", "error"}, counts
    assert counts


@pytest.mark.parametrize("how", RAISED)
def test_a_hook_can_not_excuse_a_property_under_pytest(pytester: pytest.Pytester, how: str) -> None:
    code = f"""
class MyHarness(SmallHarness):
    def fresh_config(self, tmp):
        {RAISED[how]}

class TestMine(BackendConformance):
    harness = MyHarness(MemoryBackend)
"""
    assert outcomes(pytester, code) == {"failed": 1}


@pytest.mark.parametrize("how", RAISED)
def test_a_backend_can_not_excuse_a_property_under_pytest(pytester: pytest.Pytester, how: str) -> None:
    code = f"""
class Lying(MemoryBackend):
    def open(self, host):
        {RAISED[how]}

class TestMine(BackendConformance):
    harness = SmallHarness(Lying)
"""
    assert outcomes(pytester, code) == {"failed": 1}


@pytest.mark.parametrize("how", EXCUSES)
def test_a_backend_can_not_excuse_a_property(how: str) -> None:
    class Mine(Excuses):
        excuse = EXCUSES[how]

    result = only(SmallHarness(Mine), ROUND_TRIP)
    assert result.verdict is Verdict.FAILED
    assert how in result.reason or "later" in result.reason


@pytest.mark.parametrize("how", EXCUSES)
def test_a_hook_can_not_excuse_a_property(how: str) -> None:
    class Mine(FileHarness):
        def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
            raise EXCUSES[how]()

    assert only(Mine(), OUT_OF_BAND).verdict is Verdict.FAILED


def test_a_hook_that_another_hook_is_missing_in_does_not_excuse_a_property() -> None:
    class Mine(FileHarness):
        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            return {"path": str(super(SmallHarness, self).unopenable_config(tmp))}

    assert only(Mine(), ROUND_TRIP).verdict is Verdict.FAILED


class CallsAHook(MemoryBackend):
    """Raises what the suite raises for a missing hook, from a method with a hook's name."""

    def raw_get(self) -> bytes | None:
        return Harness.raw_get(None, Path(), key_named("any"))  # type: ignore[arg-type]

    def stats(self) -> BackendStats:
        self.raw_get()
        return super().stats()


def test_a_backend_with_a_method_named_like_a_hook_does_not_excuse_a_property() -> None:
    result = only(SmallHarness(CallsAHook), "test_stats_count_what_is_stored")
    assert result.verdict is Verdict.FAILED
    assert "which excuses nothing" in result.reason


def test_a_hook_that_asks_another_harness_does_not_excuse_a_property() -> None:
    class Mine(FileHarness):
        def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
            return Harness.raw_get(FileHarness(), tmp, key)

    assert only(Mine(), OUT_OF_BAND).verdict is Verdict.FAILED


def test_code_that_only_says_it_is_the_suite_excuses_nothing() -> None:
    fake = {"__name__": "lmcache_core_conformance.verdicts", "NotApplicable": NotApplicable}
    exec("def excuse(): raise NotApplicable('capability x is False')", fake)

    class Mine(MemoryBackend):
        def open(self, host: Host) -> Capabilities | None:
            fake["excuse"]()  # type: ignore[operator]
            return None

    # also where it is the only thing between the suite and the error
    assert only(SmallHarness(Mine), ROUND_TRIP).verdict is Verdict.FAILED
    with pytest.raises(NotApplicable) as raised:
        fake["excuse"]()  # type: ignore[operator]
    error = raised.value.with_traceback(raised.tb.tb_next)
    assert verdict_of(error)[0] is Verdict.FAILED


def test_of_several_errors_the_first_violation_is_shown() -> None:
    inner = ExceptionGroup("inner", [ValueError("no"), Violation("page 1 differs")])
    assert verdict_of(ExceptionGroup("flaky", [KeyError("x"), inner])) == (Verdict.FAILED, "page 1 differs")
    assert verdict_of(ExceptionGroup("flaky", [KeyError("x")]))[1] == "KeyError: 'x'"


def test_an_excuse_in_a_group_of_errors_excuses_nothing() -> None:
    class Mine(MemoryBackend):
        def open(self, host: Host) -> Capabilities | None:
            raise ExceptionGroup("several", [NotApplicable("capability x is False")])

    assert only(SmallHarness(Mine), ROUND_TRIP).verdict is Verdict.FAILED


def test_a_fault_that_swallows_errors_does_not_swallow_a_failure() -> None:
    class Mine(SmallHarness):
        @contextlib.contextmanager
        def faulty(self, tmp: Path, fault: Fault) -> Iterator[None]:
            with super().faulty(tmp, fault), contextlib.suppress(BaseException):
                yield

    result = only(Mine(CallsARefusalAnOutage), "test_a_read_only_medium_refuses_writes_and_serves_reads")
    assert result.verdict is Verdict.FAILED
    assert result.reason.startswith("put on a read-only medium: FAILED")


def test_a_hook_may_leave_some_cases_to_its_default() -> None:
    class Mine(FileHarness):
        def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
            return self._the_default(tmp)

        def _the_default(self, tmp: Path) -> Mapping[str, object]:
            return super(SmallHarness, self).unopenable_config(tmp)

    result = only(Mine(), FAILED_OPEN)
    assert (result.verdict, result.reason) == (
        Verdict.UNPROVEN,
        "harness hook `unopenable_config` is missing",
    )


def test_what_a_class_brings_of_its_own_is_run_as_usual(pytester: pytest.Pytester) -> None:
    code = """
class TestMine(BackendConformance):
    harness = SmallHarness(MemoryBackend)

    @pytest.fixture(autouse=True)
    def prepared(self):
        self.prepared = True

    def test_of_its_own_about_test_a_value_comes_back_byte_for_byte(self):
        assert self.prepared
"""
    assert outcomes(pytester, code) == {"passed": 2}


def test_what_takes_the_place_of_a_property_is_a_failure(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    code = "class TestMine(BackendConformance):\n    harness = SmallHarness(FlipsABit)\n"
    assert outcomes(pytester, code) == {"failed": 1}
