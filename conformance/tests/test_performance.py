"""The performance group: what it measures, against what, and when a slow backend fails."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance_backends.broken_performance import ReadsInTinyPieces, WritesInTinyPieces
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.storage.contract import Capabilities
from lmcache_core_conformance import Verdict, run
from lmcache_core_conformance.baselines import BareFiles, RawDriver
from lmcache_core_conformance.figures import Figure, Measure
from lmcache_core_conformance.values import PAGE

READING = "test_reading_keeps_up_with_the_bare_medium"
WRITING = "test_writing_keeps_up_with_the_bare_medium"
BATCH = "test_a_batch_is_as_fast_as_its_items_one_by_one"


class Remote(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="network")


class Slow:
    """A raw driver that is slower than any backend."""

    description = "a slow driver"

    def __init__(self) -> None:
        self.closed = False
        self._values: dict[str, bytes] = {}

    def put(self, name: str, value: memoryview) -> None:
        sum(range(100_000))
        self._values[name] = bytes(value)

    def get(self, name: str, target: memoryview) -> None:
        sum(range(100_000))
        target[:] = self._values[name]

    def close(self) -> None:
        self.closed = True


class HarnessWithDriver(SmallHarness):
    def __init__(self) -> None:
        super().__init__(Remote)
        self.drivers: list[Slow] = []

    def raw_driver(self, tmp: Path) -> RawDriver:
        self.drivers.append(Slow())
        return self.drivers[-1]


def figure(ratio: float) -> Figure:
    return Figure(
        name="reads of 8 MiB",
        unit="GB/s",
        value=ratio * 2,
        baseline="a plain copy",
        baseline_value=2.0,
        ratio=ratio,
        low=ratio,
        high=ratio,
        rounds=3,
        floor=0.5,
    )


@pytest.mark.parametrize(("backend", "name"), [(WritesInTinyPieces, WRITING), (ReadsInTinyPieces, READING)])
def test_a_slow_backend_is_reported_and_fails_only_where_floors_are_enforced(
    backend: type[MemoryBackend], name: str
) -> None:
    harness = SmallHarness(backend)
    [reported] = run(harness, properties=[name]).results
    assert reported.verdict is Verdict.PASSED
    assert [seen.below_floor for seen in reported.figures] == [True]
    harness.enforce_performance = True
    [enforced] = run(harness, properties=[name]).results
    assert enforced.verdict is Verdict.FAILED
    assert "below the floor of 0.5" in enforced.reason
    assert enforced.figures, "a failed figure is reported too"


def test_a_network_backend_without_a_raw_driver_is_unproven_but_its_batches_are_timed() -> None:
    report = run(SmallHarness(Remote), groups=["performance"])
    verdicts = {result.prop.name: result.verdict for result in report.results}
    assert verdicts == {
        WRITING: Verdict.UNPROVEN,
        READING: Verdict.UNPROVEN,
        BATCH: Verdict.PASSED,
    }
    assert {r.reason for r in report.of(Verdict.UNPROVEN)} == {"harness hook `raw_driver` is missing"}


def test_the_harness_own_driver_is_the_baseline_and_is_closed() -> None:
    harness = HarnessWithDriver()
    harness.enforce_performance = True
    results = run(harness, properties=[WRITING, READING]).results
    assert [result.verdict for result in results] == [Verdict.PASSED, Verdict.PASSED]
    assert {seen.baseline for result in results for seen in result.figures} == {"a slow driver"}
    assert [driver.closed for driver in harness.drivers] == [True, True]


def test_a_ratio_is_the_median_of_rounds_in_changing_order() -> None:
    now, order = [0.0], []

    def runs(name: str, durations: Iterator[float]) -> Callable[[], None]:
        def work() -> None:
            order.append(name)
            now[0] += next(durations)

        return work

    ours = runs("ours", itertools.chain([1.0] * 2, iter([1.0, 2.0, 4.0])))
    theirs = runs("theirs", itertools.repeat(1.0))
    measured = Measure(rounds=3, clock=lambda: now[0], budget_s=1e9).compare(
        "reads",
        unit="GB/s",
        amount=8.0,
        ours=ours,
        baseline=theirs,
        baseline_name="a plain copy",
        floor=0.5,
    )
    assert (measured.ratio, measured.value, measured.baseline_value) == (0.5, 4.0, 8.0)
    assert (measured.low, measured.high, measured.rounds) == (0.375, 0.75, 3)
    assert order[4:] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_measuring_stops_when_its_time_is_spent() -> None:
    now = [0.0]

    def work() -> None:
        now[0] += 1.0

    measured = Measure(rounds=1000, clock=lambda: now[0], budget_s=20).compare(
        "reads", unit="GB/s", amount=1, ours=work, baseline=work, baseline_name="the same", floor=0.5
    )
    assert measured.rounds < 12


def test_a_figure_says_that_it_is_below_its_floor() -> None:
    assert "below the floor of 0.5" in str(figure(0.4))
    assert "floor" not in str(figure(0.5))


def test_bare_files_give_back_what_was_put(tmp_path: Path) -> None:
    with mmap.mmap(-1, 2 * PAGE) as memory:
        value, target = memoryview(memory)[:PAGE], memoryview(memory)[PAGE:]
        value[:5] = b"value"
        files = BareFiles(tmp_path)
        files.put("a", value)
        files.get("a", target)
        files.close()
        assert bytes(target) == bytes(value)
        value.release()
        target.release()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_under_pytest_figures_stand_in_the_summary(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from conformance_backends.harness import SmallHarness
        from conformance_backends.memory import MemoryBackend
        from lmcache_core_conformance import BackendConformance

        class TestMine(BackendConformance):
            harness = SmallHarness(MemoryBackend)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "bare_medium")
    result.stdout.fnmatch_lines_random(  # what is below its floor, as on a busy machine, comes last
        ["*conformance: performance*", "TestMine: writes of *GB/s*of a plain copy*", "TestMine: reads of *"]
    )
