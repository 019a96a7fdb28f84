"""The matrix: each property is failed by a backend broken in just that way, and a correct one passes all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from conformance_backends import (  # noqa: F401 (they fill the catalogue)
    broken_conduct,
    broken_performance,
    broken_sharing,
    broken_values,
)
from conformance_backends.catalogue import ANYTHING, CATALOGUE, Broken
from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from conformance_backends.resident import ResidentBackend
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance import PROPERTIES, Report, Verdict, run


def failures(report: Report) -> dict[str, str]:
    return {result.prop.name: result.reason for result in report.of(Verdict.FAILED)}


def explain(failed: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {reason.splitlines()[0]}" for name, reason in failed.items())


CORRECT = (MemoryBackend, FileBackend, ResidentBackend)


@cache
def report_on(backend: type[Backend[Any]]) -> Report:
    return run(SmallHarness(backend))


@pytest.mark.parametrize("backend", CORRECT, ids=lambda backend: backend.__name__)
def test_a_correct_backend_passes_every_property(backend: type[Backend[Any]]) -> None:
    failed = failures(report_on(backend))
    assert not failed, explain(failed)
    assert not report_on(backend).of(Verdict.UNPROVEN)


def test_between_them_the_correct_backends_are_subject_to_every_property() -> None:
    passed = {r.prop.name for backend in CORRECT for r in report_on(backend).of(Verdict.PASSED)}
    assert passed == {prop.name for prop in PROPERTIES}


def test_every_property_has_a_broken_backend_that_it_must_catch() -> None:
    assert {prop.name for prop in PROPERTIES} - {broken.fails for broken in CATALOGUE} == set()


@pytest.mark.parametrize("broken", CATALOGUE, ids=lambda broken: broken.backend.__name__)
def test_a_broken_backend_fails_its_property_and_only_close_neighbours(broken: Broken) -> None:
    harness = SmallHarness(broken.backend)
    harness.interruptions = 60
    harness.enforce_performance = True
    failed = failures(run(harness, properties=[broken.fails]))
    assert broken.fails in failed
    if broken.also == ANYTHING:
        return
    harness.enforce_performance = False
    harness.crash_points = harness.interruptions = harness.examples = harness.rounds = 4  # to see neighbours
    names = {prop.name for prop in PROPERTIES} - {broken.fails, *broken.also}
    others = failures(run(harness, properties=names))
    assert not others, explain(others)
