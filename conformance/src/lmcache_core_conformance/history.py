"""Recorded histories of racing calls on one key, and the check that some order of them explains them all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

T = TypeVar("T")
Version = int
ABSENT: Version = -1


class Kind(Enum):
    """What an operation does to a register that holds one version or nothing."""

    WRITE = "write"
    """Puts `version`; ABSENT deletes a value that was there."""
    READ = "read"
    """Saw `version` (ABSENT: a miss)."""
    PRESENT = "present"
    """Saw that some version was there, without seeing which."""
    MAYBE = "maybe"
    """A write whose effect is unknown: at any time after its start, or never."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: what it did or saw, and when, on a clock that only counts."""

    kind: Kind
    version: Version
    started: int
    ended: int


class History:
    """Records operations on one key from many threads."""

    def __init__(self) -> None:
        self._clock = itertools.count()  # next() is atomic under the GIL
        self._lock = threading.Lock()  # guards the list
        self._operations: list[Operation] = []

    def record(self, call: Callable[[], T], judge: Callable[[T], tuple[Kind, Version] | None]) -> None:
        """Runs `call` and records what `judge` makes of its result (None: it had no effect)."""
        started = next(self._clock)
        result = call()
        ended = next(self._clock)
        judged = judge(result)
        if judged is not None:
            with self._lock:
                self._operations.append(Operation(*judged, started, ended))

    @property
    def operations(self) -> list[Operation]:
        with self._lock:
            return sorted(self._operations, key=lambda operation: operation.started)


def is_linearizable(operations: Iterable[Operation]) -> bool:
    """Whether one order, respecting which call ended before which began, explains what every read saw.

    The register starts empty. Depth-first over the operations that may come next, each state visited
    once; cheap where few calls overlap.
    """
    history = sorted(operations, key=lambda operation: operation.started)
    due = sum(1 << n for n, operation in enumerate(history) if operation.kind is not Kind.MAYBE)
    seen: set[tuple[int, Version]] = set()
    stack: list[tuple[int, Version]] = [(0, ABSENT)]
    while stack:
        done, version = state = stack.pop()
        if done & due == due:
            return True
        if state in seen:
            continue
        seen.add(state)
        stack.extend(_next_states(history, done, version))
    return False


def _next_states(history: list[Operation], done: int, version: Version) -> Iterable[tuple[int, Version]]:
    first_end: float = float("inf")
    for n, operation in enumerate(history):
        if done >> n & 1:
            continue
        if operation.started > first_end:
            return
        if operation.kind is Kind.READ:
            if operation.version == version:
                yield done | 1 << n, version
        elif operation.kind is Kind.PRESENT:
            if version != ABSENT:
                yield done | 1 << n, version
        elif operation.kind is Kind.MAYBE or operation.version != ABSENT or version != ABSENT:
            yield done | 1 << n, operation.version
        if operation.kind is not Kind.MAYBE:
            first_end = min(first_end, operation.ended)
