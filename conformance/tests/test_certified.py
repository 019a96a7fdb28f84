"""What is certified: just the class that the harness names, unchanged from the run's beginning to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from conformance_backends.broken_values import FlipsABit
from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.storage.contract import Capabilities, Host
from lmcache_core_conformance import ReportError, Verdict, describe, run
from lmcache_core_conformance.runner import Result

ROUND_TRIP = "test_a_value_comes_back_byte_for_byte"
OUT_OF_BAND = "test_what_lies_in_the_medium_is_what_was_put"


class Repaired(FlipsABit):
    """Is right, unlike what it derives from."""

    gather = MemoryBackend.gather


def only(harness: SmallHarness, name: str) -> Result:
    return run(harness, properties=[name]).results[0]


def test_another_backend_can_not_be_certified_in_its_place() -> None:
    class Mine(SmallHarness):
        def build(self, options: Mapping[str, object]) -> MemoryBackend:
            return MemoryBackend(MemoryBackend.config_class())

    result = only(Mine(FlipsABit), ROUND_TRIP)
    assert result.verdict is Verdict.FAILED
    assert "made a MemoryBackend, no FlipsABit" in result.reason


def test_a_repaired_subclass_is_not_certified_in_its_place() -> None:
    class Mine(SmallHarness):
        def build(self, options: Mapping[str, object]) -> FlipsABit:
            return Repaired(FlipsABit.config_class())

    result = only(Mine(FlipsABit), ROUND_TRIP)
    assert result.verdict is Verdict.FAILED
    assert "made a Repaired, no FlipsABit" in result.reason


@pytest.mark.parametrize("when", ["built", "used"])
def test_a_patched_instance_is_not_certified(when: str) -> None:
    built: list[FlipsABit] = []

    def patch() -> None:
        built[-1].gather = partial(MemoryBackend.gather, built[-1])  # type: ignore[method-assign]

    class Mine(SmallHarness):
        def build(self, options: Mapping[str, object]) -> FlipsABit:
            built.append(FlipsABit(FlipsABit.config_class()))
            if when == "built":
                patch()
            return built[-1]

    class Late(FlipsABit):
        def open(self, host: Host) -> Capabilities | None:
            self.gather = partial(MemoryBackend.gather, self)  # type: ignore[method-assign]
            return super().open(host)

    result = only(Mine(FlipsABit) if when == "built" else SmallHarness(Late), ROUND_TRIP)
    assert result.verdict is Verdict.FAILED
    assert "has its own gather, past its class" in result.reason


def test_a_class_that_is_changed_while_its_properties_run_is_not_certified() -> None:
    class Broken(FlipsABit):
        pass

    class Mine(SmallHarness):
        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            Broken.gather = MemoryBackend.gather  # type: ignore[method-assign]
            return {}

    result = only(Mine(Broken), ROUND_TRIP)
    assert result.verdict is Verdict.FAILED
    assert result.reason == f"replaced since the run began: {Broken.__qualname__}.gather"


def test_a_harness_that_tries_less_hard_while_it_runs_fails() -> None:
    class Mine(SmallHarness):
        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            self.slack_s = 1e6
            return {}

    result = only(Mine(MemoryBackend), ROUND_TRIP)
    assert result.verdict is Verdict.FAILED
    assert "the harness's effort was" in result.reason


def test_a_harness_may_be_a_dataclass() -> None:
    @dataclass
    class Mine(SmallHarness):
        name: str = "mine"

        def __post_init__(self) -> None:
            super().__init__(FileBackend)

    harness = Mine()
    report = run(harness, properties=[ROUND_TRIP, OUT_OF_BAND, "test_stats_count_what_is_stored"])
    assert [result.verdict for result in report.results] == [Verdict.PASSED] * 3


def test_state_that_a_class_keeps_is_not_a_change_of_it() -> None:
    class Counting(MemoryBackend):
        num_opened = 0

        def open(self, host: Host) -> Capabilities | None:
            type(self).num_opened += 1
            return super().open(host)

    assert only(SmallHarness(Counting), ROUND_TRIP).verdict is Verdict.PASSED


def test_a_harness_that_names_another_class_later_certifies_neither() -> None:
    class Mine(SmallHarness):
        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            self._backend_class = MemoryBackend
            return {}

    harness = Mine(FlipsABit)
    report = run(harness, properties=[ROUND_TRIP])
    assert report.failed
    with pytest.raises(ReportError, match="the report is of FlipsABit, the harness is for MemoryBackend"):
        describe(report, harness)
