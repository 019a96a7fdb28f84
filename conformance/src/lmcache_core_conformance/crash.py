"""The killing of processes: a child that runs operations on a store and dies where it is told to."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.identity.keys import StorageKey
from lmcache_core_conformance.bench import spread
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.verdicts import Unproven, Violation, check

_FEW = 4

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.stdin.readline())
from lmcache_core_conformance.crash_child import main
main()
"""


@dataclass(frozen=True, slots=True)
class Operate:
    """One operation of the child: `put` of a version of a key, or `delete`."""

    name: str
    key: StorageKey
    version: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """Where to die: at the `number`-th event of `kind` (`line` or `write`) of the operations watched."""

    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. `statuses` of all operations and event counts, unless it was killed before."""

    killed: bool
    statuses: tuple[str, ...] = ()
    num_lines: int = 0
    num_writes: int = 0


class _Child:
    """The process that forks the victims. One serves a whole test run: starting it takes a while."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C isn't for it; and it is ended together with its victims
        )
        self._lock = threading.Lock()  # guards the pipes: one request at a time
        self._send(sys.path)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: object) -> dict[str, Any]:
        """
        Raises:
            Violation: the child ended by itself.
        """
        assert self._process.stdout is not None
        with self._lock:
            self._send(request)
            line = self._process.stdout.readline()
        if not line:
            raise Violation("the process that runs the store's operations ended by itself")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kills it and its victims. Idempotent; whoever waits for an answer learns that there is none."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._lock, contextlib.suppress(OSError):
            self._process.communicate()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


_children: list[_Child] = []  # at most one; crash properties run one after another


def _child() -> _Child:
    if _children and not _children[0].alive:
        _children.pop().end()
    if not _children:
        _children.append(_Child())
        atexit.register(_children[0].end)
    return _children[0]


def end_child() -> None:
    """Ends the process of a property that was given up, which may wait for a victim that hangs."""
    if _children:
        _children.pop().end()


class Crasher:
    """Kills processes that use one store."""

    def __init__(self, harness: Harness, options: Mapping[str, object]) -> None:
        self._harness = harness
        self._options = dict(options)
        self._num_killed = self._num_missed = 0

    def run(
        self, prepare: Sequence[Operate], act: Sequence[Operate], kill: CrashPoint | None = None
    ) -> Ended:
        """Opens the store in a victim, does `prepare`, then `act`, and dies at `kill` or else after it.

        Raises:
            Violation: the victim could not open the store, the child is gone, or most points are missed.
        """
        told = _child().ask(
            {
                "module": self._harness.backend.__module__,
                "class": self._harness.backend.__qualname__,
                "options": self._options,
                "capacity_bytes": self._harness.capacity_bytes,
                "prepare": [[o.name, o.key, o.version, o.nbytes] for o in prepare],
                "act": [[o.name, o.key, o.version, o.nbytes] for o in act],
                "kill": None if kill is None else [kill.kind, kill.number],
            }
        )
        if "error" in told:
            raise Violation(f"another process could not use the store: {told['error']}")
        if "killed" in told:
            self._num_killed += 1
            return Ended(killed=True)
        if kill is not None:
            self._missed()
        counts = told["counts"]
        return Ended(False, tuple(told["statuses"]), counts["line"], counts["write"])

    def points(
        self, prepare: Sequence[Operate], act: Sequence[Operate], limit: int | None = None
    ) -> list[CrashPoint]:
        """Where to kill `act`: writes and lines spread evenly, `limit` (`Harness.crash_points`) in all.

        Raises:
            Unproven: there is nowhere to kill it.
        """
        whole = self.run(prepare, act)
        limit = limit or self._harness.crash_points
        writes = [CrashPoint("write", n) for n in spread(whole.num_writes, limit // 2)]
        lines = [CrashPoint("line", n) for n in spread(whole.num_lines, max(limit - len(writes), 1))]
        if not writes + lines:
            raise Unproven("no line of Python and no os.write runs in it, so it can't be killed at any")
        return writes + lines

    def _missed(self) -> None:
        """A later run may have fewer events than the one that was counted, but not far fewer."""
        self._num_missed += 1
        missed, points = self._num_missed, self._num_missed + self._num_killed
        too_few = missed > self._num_killed + _FEW
        check(not too_few, f"the process outlived {missed} of {points} points at which it was to be killed")
