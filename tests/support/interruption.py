"""Ctrl-C at a chosen place: wherever CPython 3.11 looks for signals in the code under test, one at a time."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

_CHECKS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")}
# A call of Python by Python is checked where it starts, not where it comes back; one of `__init__` at both.
_STARTS, _CAME_BACK = -1, -2


def interrupt_at(number: int, packages: str | tuple[str, ...], work: Callable[[], object]) -> str | None:
    """Runs `work` and raises KeyboardInterrupt in it at the `number`-th such place in code of `packages`.

    Returns where that was, or None when `work` ended before it got there. Any other error goes through.
    """
    left = [number]
    where: list[str] = []
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(packages):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "call":
            before[frame] = _STARTS
            caller = frame.f_back
            if caller in before and frame.f_code.co_name != "__init__":
                before[caller] = _CAME_BACK
        elif event == "opcode":
            at, now = before[frame], frame.f_lasti
            before[frame] = now
            code = frame.f_code
            called = at >= 0 and code.co_code[at] in _CHECKS and _alike(code, at, now)
            if at == _STARTS or called:
                left[0] -= 1
                if left[0] < 0:
                    sys.settrace(None)
                    where.append(f"{code.co_qualname}:{frame.f_lineno}")
                    before.clear()
                    raise KeyboardInterrupt
        elif event == "return":
            before.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return where[0] if where else None


def _alike(code: CodeType, first: int, second: int) -> bool:
    """Whether an error at either goes to the same handler: only then can one stand for the other."""
    return _handler(code, first) == _handler(code, second)


def _handler(code: CodeType, offset: int) -> int | None:
    return next((entry.target for entry in _entries(code) if entry.start <= offset < entry.end), None)


@cache
def _entries(code: CodeType) -> list[Any]:
    """The exception table: read for every instruction that is traced, so parsed once."""
    return list(dis._parse_exception_table(code))  # type: ignore[attr-defined]
