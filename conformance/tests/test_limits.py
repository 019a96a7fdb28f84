"""Slow and coarse backends: the suite tells what is slow from what hangs, and names its own sizes."""

from __future__ import annotations

import pytest

from conformance_backends.asynchronous import LastFirst
from conformance_backends.harness import SmallHarness
from conformance_backends.limited import ListsInFitsAndStarts, TakesItsTime, TakesRoomInLargeSteps
from conformance_backends.memory import MemoryBackend
from lmcache_core_conformance import Verdict, run
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.timing import affordable

SLOW = (
    "test_a_call_held_up_at_any_line_does_not_spoil_another",
    "test_any_sequence_of_operations_agrees_with_a_plain_dictionary",
    "test_scans_and_stats_beside_a_writer_tell_what_is_there",
)
FULL = "test_a_full_store_says_so_and_keeps_what_it_has"


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_backend_is_tried_less_hard_instead_of_found_hung(name: str) -> None:
    class FewSeconds(SmallHarness):
        limit_s = 15.0
        interruptions = 150
        examples = 40

    reasons: list[str] = []
    for _ in range(3):  # what it estimates in a quiet moment may take longer in the next
        [result] = run(FewSeconds(TakesItsTime), properties=[name]).results
        if result.verdict is Verdict.PASSED:
            return
        reasons.append(result.reason)
    pytest.fail("\n".join(reasons))


def test_a_batch_may_be_worked_through_from_its_end() -> None:
    """Of two values put under one key in a batch, either may win."""
    report = run(SmallHarness(LastFirst), groups=["batching", "round-trip"])
    assert not report.failed, [result.reason for result in report.of(Verdict.FAILED)]


def test_a_scan_may_repeat_values_and_give_empty_pages() -> None:
    """The contract says "at least once", and servers' own scans do both."""
    groups = ["honesty", "endurance", "corruption", "round-trip", "crash"]
    report = run(SmallHarness(ListsInFitsAndStarts), groups=groups)
    assert not report.failed, [result.reason for result in report.of(Verdict.FAILED)]


def test_a_fast_backend_is_tried_as_hard_as_the_harness_says() -> None:
    bench = Bench(SmallHarness(MemoryBackend))
    try:
        assert affordable(bench, 10**6, 10**6) == 10**6
    finally:
        bench.close()


def test_a_store_that_is_full_too_early_learns_which_bound_was_too_small() -> None:
    result = run(SmallHarness(TakesRoomInLargeSteps), properties=[FULL]).results[0]
    assert result.verdict is Verdict.FAILED
    assert "small_capacity_bytes (1048576)" in result.reason
