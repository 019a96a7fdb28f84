"""How a property ends, and the exceptions by which its code says so."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from enum import Enum
from types import FrameType

_SUITE = __name__.partition(".")[0]
_NEUTRAL = ("contextlib", "threading")
"""Modules whose frames stand between two of the suite's own."""


class Verdict(Enum):
    """What one property says about one backend."""

    PASSED = "passed"
    FAILED = "failed"
    UNPROVEN = "unproven"
    """The harness lacks a hook that the property needs, or the backend's capabilities make no sense."""
    NOT_APPLICABLE = "not applicable"
    """A declared capability makes the property meaningless."""
    DEVIATION = "deviation"
    """Failed, and listed by the harness as a known deviation."""


def said(verdict: Verdict, *, below_floor: bool) -> str:
    """A verdict in words: what only passed because its floor wasn't enforced doesn't just say so."""
    return f"{verdict.value} (below floor)" if below_floor else verdict.value


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


def verdict_of(error: BaseException, harness: object = None) -> tuple[Verdict, str]:
    """What a property says that ended by `error`, and why.

    `Unproven` and `NotApplicable` are the suite's to raise: from a backend or a hook they are failures,
    like everything else. A hook of `harness` may leave a case to the default that it overrides, which is
    then missing.
    """
    if isinstance(error, NotApplicable | Unproven):
        frames: list[FrameType | None] = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        *callers, raising = frames or [None]
        foreign = [frame for frame in callers if not _is_of(frame, _SUITE, *_NEUTRAL)]
        missing_hook = isinstance(error, Unproven) and _is_missing_hook(raising, foreign, harness)
        if _is_of(raising, _SUITE) and (not foreign or missing_hook):
            verdict = Verdict.UNPROVEN if isinstance(error, Unproven) else Verdict.NOT_APPLICABLE
            return verdict, str(error)
        reason = f"{type(error).__name__} was raised by the backend or a hook, which excuses nothing: {error}"
        return Verdict.FAILED, reason
    if isinstance(error, BaseExceptionGroup):  # such as hypothesis's, of what fails not each time
        return Verdict.FAILED, verdict_of(_foremost(error))[1]
    if isinstance(error, AssertionError):
        return Verdict.FAILED, str(error)
    return Verdict.FAILED, f"{type(error).__name__}: {error}"


def _foremost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first violation in a group and the groups in it; where there is none, the first error."""
    found = [one if not isinstance(one, BaseExceptionGroup) else _foremost(one) for one in group.exceptions]
    return next((one for one in found if isinstance(one, Violation)), found[0])


def _is_missing_hook(raising: FrameType | None, foreign: Sequence[FrameType | None], harness: object) -> bool:
    """Whether a hook was left to its default by `harness` itself, and nothing else stood in between."""
    hooks = [frame.f_code.co_name for frame in foreign if frame is not None]
    return (
        raising is not None
        and raising.f_code.co_name in hooks
        and all(_is_method_of(harness, frame) for frame in (raising, *foreign))
    )


def _is_method_of(harness: object, frame: FrameType | None) -> bool:
    if frame is None or not frame.f_code.co_argcount:
        return False
    return frame.f_locals.get(frame.f_code.co_varnames[0]) is harness


def _is_of(frame: FrameType | None, *packages: str) -> bool:
    """Whether the code of a frame is in one of these, and doesn't only say so."""
    if frame is None:
        return False
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in packages and vars(sys.modules.get(name, object)) is frame.f_globals
