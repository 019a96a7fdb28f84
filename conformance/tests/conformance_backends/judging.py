"""Runs the suite on the backends of this package. Called in processes of their own, two at a time."""

from __future__ import annotations

import ctypes
import signal
from dataclasses import dataclass

from conformance_backends import (  # noqa: F401 (they fill the catalogue)
    broken_conduct,
    broken_core,
    broken_corruption,
    broken_endings,
    broken_endurance,
    broken_network,
    broken_overlap,
    broken_performance,
    broken_pieces,
    broken_retention,
    broken_room,
    broken_sharing,
    broken_system_calls,
    broken_values,
)
from conformance_backends.asynchronous import AsynchronousBackend
from conformance_backends.catalogue import ANYTHING, CATALOGUE
from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.limited import (
    CoarseRanges,
    CoarseRangesOfSmallValues,
    SinglePages,
    SmallValues,
)
from conformance_backends.memory import MemoryBackend
from conformance_backends.network import NetworkBackend
from conformance_backends.resident import ResidentBackend
from conformance_backends.retaining_files import EvictingFiles, PinningFiles
from lmcache_core_conformance import PROPERTIES, Report, Verdict, run

CORRECT = (
    MemoryBackend,
    FileBackend,
    ResidentBackend,
    NetworkBackend,
    AsynchronousBackend,
    PinningFiles,
    EvictingFiles,
    SmallValues,
    SinglePages,
    CoarseRanges,
    CoarseRangesOfSmallValues,
)
_SHOW_NO_NEIGHBOURS = ("performance", "endurance")
"""Groups that give figures, or make thousands of calls whatever the effort."""
_STARTS_PROCESSES = "crash"
"""The group that costs most of all: looked through for neighbours in it alone."""
_COSTLY = (
    "a_batch_does_nothing_more_once_its_time_is_over",
    "a_call_held_up_at_any_line_does_not_spoil_another",
    "a_frame_of_many_layers_comes_back_in_as_many_views",
    "any_sequence_of_operations_agrees_with_a_plain_dictionary",
    "as_many_calls_as_declared_run_at_once",
    "calls_that_end_badly_leave_nothing_behind",
    "every_number_of_pages_is_stored_whole",
    "racing_calls_on_one_key_have_an_order_that_explains_them",
)
"""More than a third of the time that neighbours take: looked at for every eighth backend only."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Judgement:
    """What the suite says of a broken backend: of its own property, and of all that should hold."""

    caught: bool
    others: dict[str, str]


def failures(report: Report) -> dict[str, str]:
    return {result.prop.name: result.reason for result in report.of(Verdict.FAILED)}


def end_with_parent() -> None:
    """Has the kernel end this process with the one that made it, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def certify(index: int) -> Report:
    """The whole suite on a correct backend."""
    return run(SmallHarness(CORRECT[index]))


def judge(name: str) -> Judgement:
    """A broken backend's own property with full effort, the others with as little as shows neighbours.

    By name: another process may have imported the modules, and so filled the catalogue, in another order.
    """
    by_name = sorted(CATALOGUE, key=lambda entry: entry.backend.__name__)
    [(place, broken)] = [each for each in enumerate(by_name) if each[1].backend.__name__ == name]
    harness = SmallHarness(broken.backend)
    harness.interruptions = 60
    harness.enforce_performance = True
    caught = broken.fails in failures(run(harness, properties=[broken.fails]))
    if not caught:  # on a busy machine a call may reach the backend after so short a deadline
        harness.stalled_deadline_s *= 8
        caught = broken.fails in failures(run(harness, properties=[broken.fails]))
    if broken.also == ANYTHING:
        return Judgement(caught, {})
    harness.crash_points = harness.rounds = 2
    harness.examples, harness.interruptions = 2, 1
    own = next(prop.group for prop in PROPERTIES if prop.name == broken.fails)
    left_out = _SHOW_NO_NEIGHBOURS + ((_STARTS_PROCESSES,) if own != _STARTS_PROCESSES else ())
    names = {prop.name for prop in PROPERTIES if prop.group not in left_out}
    if place % 8:
        names -= {f"test_{name}" for name in _COSTLY}
    others = failures(run(harness, properties=names - {broken.fails, *broken.also}))
    if others:  # nor is a neighbour what only a busy machine makes one
        harness.stalled_deadline_s *= 8
        others = failures(run(harness, properties=set(others)))
    return Judgement(caught, others)
