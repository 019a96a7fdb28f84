"""Ill-declared capabilities: one property says which and why, and no other fails for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.storage.contract import Capabilities, Host
from lmcache_core_conformance import PROPERTIES, Verdict, describe, encode, parse, run

DECLARED = "test_capabilities_are_declared_as_the_contract_has_them"
WRONG: dict[str, dict[str, Any]] = {
    "medium is 'tape'": {"medium": "tape"},
    "delete is 1, not True or False": {"delete": 1},
    "max_batch is -1": {"max_batch": -1},
    "max_batch is '8'": {"max_batch": "8"},
    "max_value_bytes is 0": {"max_value_bytes": 0},
    "max_in_flight is 0": {"max_in_flight": 0},
    "max_in_flight is None": {"max_in_flight": None},
    "range_min is -4096": {"range_min": -4096},
    "devices is {'cpu'}, not a frozenset": {"devices": {"cpu"}},
    "stat_cost_s is '1ms'": {"stat_cost_s": "1ms"},
}


class Declaring(MemoryBackend):
    changes: ClassVar[dict[str, Any]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, **self.changes)


class Narrowing(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        super().open(host)
        return replace(self.capabilities, max_batch=0)


class Changing(MemoryBackend):
    opened = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_in_flight=2 if self.opened else 1)

    def open(self, host: Host) -> Capabilities | None:
        self.opened = True
        return super().open(host)


class Nothing(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return None  # type: ignore[return-value]


def reason(backend: type[MemoryBackend]) -> str:
    [result] = run(SmallHarness(backend), properties=[DECLARED]).results
    assert result.verdict is Verdict.FAILED
    return result.reason


@pytest.mark.parametrize("message", WRONG)
def test_an_ill_declared_capability_is_named(message: str) -> None:
    class Mine(Declaring):
        changes: ClassVar[dict[str, Any]] = WRONG[message]

    assert reason(Mine).startswith(f"its capabilities: {message}")


def test_no_capabilities_at_all_are_told() -> None:
    assert reason(Nothing) == "its capabilities: a NoneType, not Capabilities"


def test_what_open_returns_is_judged_too() -> None:
    assert reason(Narrowing).startswith("what open returned: max_batch is 0")


def test_what_is_declared_stays_the_same() -> None:
    assert "before it was opened, and are" in reason(Changing)


class ASet(Declaring):
    changes: ClassVar[dict[str, Any]] = {"devices": {"cpu"}}


@pytest.mark.parametrize("backend", [Nothing, Narrowing, ASet])
def test_nothing_else_fails_and_all_say_why_in_one_line(backend: type[MemoryBackend]) -> None:
    harness = SmallHarness(backend)
    report = run(harness)
    assert [result.prop.name for result in report.of(Verdict.FAILED)] == [DECLARED]
    unproven = report.of(Verdict.UNPROVEN)
    assert len(unproven) > len(PROPERTIES) / 2
    for result in unproven:
        assert result.reason.startswith("nothing can be shown with ill-declared capabilities: ")
        assert "\n" not in result.reason
    document = describe(report, harness)
    assert parse(encode(document)).capabilities == {}
