"""What the performance group measures: a rate beside a baseline that ran in turn with it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

_SAMPLE_S = 0.005
"""The least that one timed sample takes: shorter work is repeated inside it."""
_MAX_REPEATS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured rate. `ratio` is the median over the rounds of ours to the baseline's, which ran
    beside it; `low` and `high` are its quartiles. The floor counts only where it is enforced.
    """

    name: str
    unit: str
    value: float
    baseline: str
    baseline_value: float
    ratio: float
    low: float
    high: float
    rounds: int
    floor: float

    @property
    def below_floor(self) -> bool:
        return self.ratio < self.floor

    def __str__(self) -> str:
        below = f", below the floor of {self.floor:g}" if self.below_floor else ""
        return (
            f"{self.name}: {amount(self.value)} {self.unit}, {self.ratio:.2f} of {self.baseline} "
            f"({self.low:.2f} to {self.high:.2f}; {amount(self.baseline_value)} {self.unit}){below}"
        )


def amount(value: float) -> str:
    """A rate with about three digits: `1.69`, `24,300`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How two ways of doing the same are timed: in turn, in changing order, after one untimed round.

    It stops after `rounds`, at least two, or once `budget_s` is spent and there are `least_rounds`.
    """

    rounds: int = 11
    least_rounds: int = 3
    budget_s: float = 10.0
    clock: Callable[[], float] = time.perf_counter

    def compare(
        self,
        name: str,
        *,
        unit: str,
        amount: float,
        ours: Callable[[], None],
        baseline: Callable[[], None],
        baseline_name: str,
        floor: float,
    ) -> Figure:
        """The figure of `ours`, each run of either moving `amount` of `unit` times seconds."""
        started = self.clock()
        ours()
        baseline()
        repeats = self._repeats(ours, baseline)
        pairs: list[tuple[float, float]] = []
        while len(pairs) < self.rounds:
            if len(pairs) >= self.least_rounds and self.clock() - started > self.budget_s:
                break
            if len(pairs) % 2:
                theirs_s, ours_s = self._time(baseline, repeats), self._time(ours, repeats)
            else:
                ours_s, theirs_s = self._time(ours, repeats), self._time(baseline, repeats)
            pairs.append((ours_s, theirs_s))
        low, ratio, high = statistics.quantiles(
            [theirs_s / ours_s for ours_s, theirs_s in pairs], n=4, method="inclusive"
        )
        return Figure(
            name=name,
            unit=unit,
            value=amount / statistics.median(ours_s for ours_s, _ in pairs),
            baseline=baseline_name,
            baseline_value=amount / statistics.median(theirs_s for _, theirs_s in pairs),
            ratio=ratio,
            low=low,
            high=high,
            rounds=len(pairs),
            floor=floor,
        )

    def _repeats(self, ours: Callable[[], None], baseline: Callable[[], None]) -> int:
        quickest = min(self._time(ours, 1), self._time(baseline, 1))
        return min(max(math.ceil(_SAMPLE_S / quickest), 1), _MAX_REPEATS)

    def _time(self, work: Callable[[], None], repeats: int) -> float:
        """Seconds of one run of `work`, over `repeats` runs."""
        started = self.clock()
        for _ in range(repeats):
            work()
        return max(self.clock() - started, 1e-9) / repeats
