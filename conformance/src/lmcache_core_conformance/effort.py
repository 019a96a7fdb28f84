"""How hard a harness has the suite try: its numbers, judged, and compared with the suite's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lmcache_core_conformance.harness import Harness

_LENIENT = ("deadline_s", "limit_s", "slack_s", "stalled_deadline_s", "threads_end_s")
"""Of these the larger is the weaker: what a backend may take. Of all others, the smaller."""
_DEFAULTS: Mapping[str, float] = {
    name: default
    for name, default in vars(Harness).items()
    if isinstance(default, int | float) and not isinstance(default, bool) and not name.startswith("_")
}


def effort_of(harness: Harness) -> dict[str, float]:
    """The numbers by which a harness says how hard the suite tries.

    Raises:
        TypeError: one is no number of its kind.
        ValueError: one is not positive, or not finite.
    """
    effort: dict[str, float] = {}
    for name, default in _DEFAULTS.items():
        value: object = getattr(harness, name)
        kinds, kind = (int, "a whole number") if isinstance(default, int) else ((int, float), "a number")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{type(harness).__name__}.{name} must be {kind}, not {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{type(harness).__name__}.{name} must be positive and finite, not {value!r}")
        effort[name] = int(value) if isinstance(value, int) else float(value)  # no subclasses
    return effort


def reduced(effort: Mapping[str, float]) -> tuple[str, ...]:
    """The names of those that are weaker than the suite's defaults."""
    return tuple(
        name
        for name, value in sorted(effort.items())
        if (default := _DEFAULTS.get(name)) is not None
        and (value > default if name in _LENIENT else value < default)
    )


def words_of(names: tuple[str, ...]) -> str:
    """What is to be told of a run with these reduced; empty where none is."""
    return f"effort reduced: {', '.join(names)}" if names else ""
