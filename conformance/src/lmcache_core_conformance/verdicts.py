"""How a property ends, and the exceptions by which its code says so."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What one property says about one backend."""

    PASSED = "passed"
    FAILED = "failed"
    UNPROVEN = "unproven"
    """The harness lacks a hook that the property needs."""
    NOT_APPLICABLE = "not applicable"
    """A declared capability makes the property meaningless."""
    DEVIATION = "deviation"
    """Failed, and listed by the harness as a known deviation."""


class Violation(AssertionError):
    """The backend broke a property; the message says what was seen and what was due."""


class Unproven(Exception):
    """The property can't be shown; the message names the missing harness hook."""


class NotApplicable(Exception):
    """The property means nothing for this backend; the message names the capability that says so."""


def check(condition: object, message: str) -> None:
    """Stays in force under `python -O`, where `assert` does not.

    Raises:
        Violation: `condition` is false.
    """
    if not condition:
        raise Violation(message)
