"""The matrix: each property is failed by a backend broken in just that way, and a correct one passes all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import pytest

from conformance_backends.catalogue import CATALOGUE
from conformance_backends.judging import CORRECT, Judgement, certify, end_with_parent, failures, judge
from lmcache_core_conformance import PROPERTIES, Report, Verdict

_PROCESSES = 4  # the suite waits as long as it computes
BROKEN = {broken.backend.__name__: broken for broken in CATALOGUE}


@dataclass(frozen=True)
class Runs:
    """The runs under way, in the order of the tests that wait for them."""

    reports: list[Future[Report]]
    judgements: dict[str, Future[Judgement]]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, spawn, initializer=end_with_parent) as pool:
        yield Runs(
            [pool.submit(certify, index) for index in range(len(CORRECT))],
            {name: pool.submit(judge, name) for name in BROKEN},
        )
        pool.shutdown(cancel_futures=True)


def explain(failed: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {reason.splitlines()[0]}" for name, reason in failed.items())


@pytest.mark.parametrize("index", range(len(CORRECT)), ids=[backend.__name__ for backend in CORRECT])
def test_a_correct_backend_passes_every_property(runs: Runs, index: int) -> None:
    report = runs.reports[index].result()
    failed = failures(report)
    assert not failed, explain(failed)
    assert not report.of(Verdict.UNPROVEN)


def test_between_them_the_correct_backends_are_subject_to_every_property(runs: Runs) -> None:
    passed = {r.prop.name for run in runs.reports for r in run.result().of(Verdict.PASSED)}
    assert passed == {prop.name for prop in PROPERTIES}


def test_every_property_has_a_broken_backend_that_it_must_catch() -> None:
    assert {prop.name for prop in PROPERTIES} - {broken.fails for broken in CATALOGUE} == set()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails_its_property_and_only_close_neighbours(runs: Runs, name: str) -> None:
    judgement = runs.judgements[name].result()
    assert judgement.caught, f"{BROKEN[name].fails} passed"
    assert not judgement.others, explain(judgement.others)
