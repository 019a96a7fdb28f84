"""The deviations that a harness lists, judged before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from lmcache_core_conformance.harness import Deviation, Harness


def deviations_of(harness: Harness, known: Collection[str]) -> dict[str, str]:
    """The reason of each deviation, by the name of its property. `known` are the names of all properties.

    Raises:
        TypeError: `Harness.deviations` is not a tuple of `Deviation`s of two texts.
        ValueError: one names no property or gives no reason, or two name the same.
    """
    listed: object = harness.deviations
    if not isinstance(listed, tuple | list):
        raise TypeError(f"{_where(harness)} must be a tuple of Deviations, not {listed!r}")
    reasons: dict[str, str] = {}
    for deviation in listed:
        if not isinstance(deviation, Deviation):
            raise TypeError(f"{_where(harness)} holds {deviation!r}, which is no Deviation")
        name, reason = deviation.property_name, deviation.reason
        if not isinstance(name, str) or not isinstance(reason, str):
            raise TypeError(f"{_where(harness)} holds {deviation!r}: its name and its reason must be texts")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) + [n for n in known if n == f"test_{name}"]
            hint = f"; did you mean {near[-1]!r}?" if near else ""
            raise ValueError(f"{_where(harness)} names {name!r}, which is no property{hint}")
        if not reason.strip():
            raise ValueError(f"{_where(harness)} gives no reason for {name}")
        if name in reasons:
            raise ValueError(f"{_where(harness)} names {name} twice")
        reasons[name] = reason
    return reasons


def _where(harness: Harness) -> str:
    return f"{type(harness).__name__}.deviations"
