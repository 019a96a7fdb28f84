"""The hooks: what needs a missing one is unproven and names it; one that does nothing lets nothing pass.

Which properties rely on which hook is recorded in an honest run, so no hook and no property is forgotten.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from conformance_backends.network import NetworkBackend
from lmcache_core.storage.contract import Backend, Capabilities, Host
from lmcache_core_conformance import Harness, Unproven, Verdict, run
from lmcache_core_conformance.baselines import RawDriver
from lmcache_core_conformance.behind import Behind, Fault
from lmcache_core_conformance.crash import Crasher, Operate
from lmcache_core_conformance.runner import Result
from lmcache_core_conformance.values import key_named

MAKE_THE_STORE = {"fresh_config", "build", "backend_medium"}
"""Methods of a harness that are no hooks: without them there is nothing to certify."""
MISSING_IS_NORMAL = {"small_config"}
"""Hooks whose default is what most stores need."""
MODEL = "test_any_sequence_of_operations_agrees_with_a_plain_dictionary"
TRIED_ON_THE_WAY = {
    ("wrong_credentials", "test_secrets_are_never_shown"),
    ("small_config", "test_the_bound_holds_for_what_was_there_before"),
    ("small_config", MODEL),
}
"""A hook and a property that uses it if it is there, and proves its sentence without."""
DOES_WITHOUT = {("raw_delete", MODEL)}
"""A hook and a property that proves less without it, but is not to be fooled by it."""
BACKENDS: tuple[type[Backend[Any]], ...] = (FileBackend, NetworkBackend)


class IdleDriver:
    description = "a driver that does nothing"

    def put(self, name: str, value: memoryview) -> None: ...

    def get(self, name: str, target: memoryview) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Hook:
    """A method of the harness; of `faulty`, one fault."""

    name: str
    fault: Fault | None = None

    def __str__(self) -> str:
        return self.name if self.fault is None else f"{self.name} {self.fault.value}"

    @property
    def default(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(Harness, self.name)
        return found

    def concerns(self, arguments: tuple[object, ...]) -> bool:
        return self.fault is None or self.fault in arguments

    def put_into(self, harness: Harness, instead: Callable[..., Any]) -> None:
        """Puts `instead` in the hook's place; of `faulty`, for this fault only."""
        theirs = getattr(harness, self.name)

        def either(harness: Harness, *arguments: object) -> Any:
            return instead(harness, *arguments) if self.concerns(arguments) else theirs(*arguments)

        setattr(harness, self.name, MethodType(either, harness))

    def idle(self, harness: Harness, tmp: Path, *arguments: object) -> Any:
        """What comes from a hook that does nothing, by what it says it returns."""
        returns = inspect.signature(self.default, eval_str=True).return_annotation
        results: dict[object, Callable[[], object]] = {
            None: lambda: None,
            int: lambda: 0,
            bytes | None: lambda: None,
            AbstractContextManager[None]: nullcontext,
            RawDriver: IdleDriver,
            Mapping[str, object]: lambda: harness.fresh_config(tmp),
        }
        return results[returns]()


HOOKS = [
    Hook(name, fault)
    for kind in (Behind, Harness)
    for name, method in vars(kind).items()
    if inspect.isfunction(method) and not name.startswith("_") and name not in MAKE_THE_STORE
    for fault in (Fault if name == "faulty" else [None])
]


class TakesNoBound(NetworkBackend):
    """Its server has a bound of its own, which only `small_config` could set."""

    def open(self, host: Host) -> Capabilities | None:
        unbounded = copy(host)
        unbounded.capacity_bytes = None  # type: ignore[misc]  # of the suite's own host it can be set
        return super().open(unbounded)


class Certain(SmallHarness):
    """Gives the same options when it is asked for the same store again."""

    stalled_deadline_s = 0.2
    rounds = interruptions = examples = crash_points = 4  # which hooks are called doesn't depend on them

    def __init__(self, backend: type[Backend[Any]]) -> None:
        super().__init__(backend)
        self._options: dict[Path, Mapping[str, object]] = {}

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        if tmp not in self._options:
            self._options[tmp] = super().fresh_config(tmp)
        return self._options[tmp]


class Unstalled(Certain):
    """Its medium never stalls: then nothing takes half of such a deadline, however busy the machine is."""

    stalled_deadline_s = 60.0


@cache
def relying(backend: type[Backend[Any]]) -> Mapping[Hook, set[str]]:
    """Which properties of a correct backend pass with the help of each hook."""
    harness, used = Certain(backend), set[Hook]()
    found: dict[Hook, set[str]] = {hook: set() for hook in HOOKS}
    for hook in HOOKS:
        honest = getattr(harness, hook.name)

        def watched(
            _: Harness, *arguments: object, hook: Hook = hook, honest: Callable[..., Any] = honest
        ) -> Any:
            used.add(hook)
            return honest(*arguments)

        hook.put_into(harness, watched)

    def note(result: Result) -> None:
        for hook in used:
            if result.verdict is Verdict.PASSED and (hook.name, result.prop.name) not in TRIED_ON_THE_WAY:
                found[hook].add(result.prop.name)
        used.clear()

    run(harness, on_result=note)
    return found


def verdicts(harness: Harness, properties: set[str]) -> dict[str, tuple[Verdict, str]]:
    report = run(harness, properties=properties)
    return {result.prop.name: (result.verdict, result.reason) for result in report.results}


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_every_hook_is_relied_on_by_a_property(hook: Hook) -> None:
    assert any(relying(backend)[hook] for backend in BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_a_hook_that_does_nothing_lets_no_property_pass_that_relies_on_it(
    hook: Hook, backend: type[Backend[Any]]
) -> None:
    needs_the_hook = TakesNoBound if hook.name == "small_config" else backend
    harness = (Unstalled if hook.fault in (Fault.STALLED, Fault.TRICKLING) else Certain)(needs_the_hook)
    hook.put_into(harness, hook.idle)
    found = verdicts(harness, relying(backend)[hook])
    assert [name for name, (verdict, _) in found.items() if verdict is Verdict.PASSED] == []


@pytest.mark.parametrize("hook", [h for h in HOOKS if h.fault is None], ids=str)
def test_what_needs_a_missing_hook_is_unproven_and_names_it(hook: Hook) -> None:
    harness = Certain(NetworkBackend)
    relied = {name for name in relying(NetworkBackend)[hook] if (hook.name, name) not in DOES_WITHOUT}
    setattr(harness, hook.name, MethodType(hook.default, harness))
    if hook.name not in MISSING_IS_NORMAL:
        missing = (Verdict.UNPROVEN, f"harness hook `{hook.name}` is missing")
        assert verdicts(harness, relied) == dict.fromkeys(relied, missing)


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_what_needs_a_fault_that_can_not_be_made_is_unproven_and_names_it(fault: Fault) -> None:
    class WithoutOneFault(Certain):
        def faulty(self, tmp: Path, wanted: Fault) -> AbstractContextManager[None]:
            if wanted is fault:
                return Behind.faulty(self, tmp, fault)
            return super().faulty(tmp, wanted)

    relied = relying(NetworkBackend)[Hook("faulty", fault)]
    missing = (Verdict.UNPROVEN, f"harness hook `faulty` does not make a medium {fault.value}")
    assert verdicts(WithoutOneFault(NetworkBackend), relied) == dict.fromkeys(relied, missing)


@pytest.mark.parametrize(
    ("hook", "name", "said"),
    [
        ("raw_put", "test_a_flipped_bit_is_never_served", "`raw_put` did not leave its bytes"),
        ("raw_get", "test_a_flipped_bit_is_never_served", "left nothing that hook `raw_get` sees"),
        ("raw_delete", "test_a_value_removed_behind_our_back_is_a_miss", "`raw_delete` left the value"),
        ("num_requests", "test_the_driver_retries_nothing", "`num_requests` did not count a put: 0, then 0"),
        ("litter", "test_what_belongs_to_others_is_neither_listed_nor_touched", "`litter` left nothing"),
        (
            "narrower_credentials",
            "test_rights_narrower_than_declared_are_told_when_opening",
            "`narrower_credentials` gives rights to all that is declared",
        ),
        ("faulty", "test_close_wakes_a_call_that_waits", "`faulty` made no medium that is stalled"),
        ("faulty", "test_a_server_that_comes_back_is_used_again", "`faulty` made no medium that is killed"),
    ],
)
def test_the_failure_names_the_hook_that_did_nothing(hook: str, name: str, said: str) -> None:
    harness = Unstalled(NetworkBackend)
    for one in HOOKS:
        if one.name == hook:
            one.put_into(harness, one.idle)
    verdict, reason = verdicts(harness, {name})[name]
    assert verdict is Verdict.FAILED
    assert f"harness hook {said}" in reason or said in reason


def test_a_stall_that_fails_calls_instead_of_holding_them_proves_no_stall() -> None:
    class Kills(Unstalled):
        def faulty(self, tmp: Path, fault: Fault) -> AbstractContextManager[None]:
            return super().faulty(tmp, Fault.KILLED if fault is Fault.STALLED else fault)

    stalled = relying(NetworkBackend)[Hook("faulty", Fault.STALLED)]
    assert {verdict for verdict, _ in verdicts(Kills(NetworkBackend), stalled).values()} == {Verdict.FAILED}


def test_points_at_which_nothing_dies_prove_no_crash(tmp_path: Path) -> None:
    harness = SmallHarness(FileBackend)
    crasher = Crasher(harness, harness.fresh_config(tmp_path))
    act = [Operate("put", key_named("outlived"), 1, 4096)]
    points = [replace(point, number=10**6) for point in crasher.points([], act)]
    for point in points[:4]:  # a few may be missed
        assert not crasher.run([], act, point).killed
    with pytest.raises(AssertionError, match="the process outlived 5 of 5 points"):
        crasher.run([], act, points[4])


def test_what_runs_no_python_can_not_be_killed_at_any_point() -> None:
    crasher = Crasher(SmallHarness(MemoryBackend), {})
    with pytest.raises(Unproven, match="can't be killed"):
        crasher.points([], [])


def test_a_capability_that_the_harness_gives_no_way_to_try_is_a_failure() -> None:
    class Bare(SmallHarness):
        wrong_credentials = Behind.wrong_credentials

    name = "test_every_declared_capability_is_exercised"
    assert run(Bare(NetworkBackend), properties=[name]).results[0].verdict is Verdict.FAILED
    assert run(SmallHarness(NetworkBackend), properties=[name]).results[0].verdict is Verdict.PASSED


def test_the_default_litter_lies_in_every_directory(tmp_path: Path) -> None:
    (tmp_path / "shard").mkdir()
    Behind.litter(SmallHarness(FileBackend), tmp_path)
    assert (tmp_path / "shard" / "Foreign file.txt").is_file()
    assert (tmp_path / "Foreign directory").is_dir()


def test_no_hook_is_pretended(tmp_path: Path) -> None:
    with pytest.raises(Unproven, match="raw_get"):
        Behind.raw_get(SmallHarness(FileBackend), tmp_path, "key")  # type: ignore[arg-type]
