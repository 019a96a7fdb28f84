"""The process that is killed: forks once for each crash point, and dies there by SIGKILL.

Started by `crash.py`; reads one JSON object a line and answers each with one. A request names the
backend and its options; `prepare` and `act` are lists of operations, and `kill` says at which event of
`act` to die (`line` n, `write` n; null: after all of it).

It is a fresh process with one thread, so forking it is safe; importing everything once makes a crash
point cost milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

from lmcache_core.config import parse_options
from lmcache_core.identity.keys import storage_key
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance.driver import RecordingHost, Store
from lmcache_core_conformance.values import PAGE, value_of

T = TypeVar("T")
_OWN = "lmcache_core_conformance"
_WRITES = ("write", "pwrite", "writev", "pwritev")


class CrashPoint:
    """Counts what happens while armed, and kills this process at the n-th event of one kind.

    `line`: a line of Python is about to run, in any module but the suite's own. `write`: one of
    os.write, pwrite, writev, pwritev is called; half of its bytes are written, then the process dies,
    as when SIGKILL meets a system call under way.
    """

    def __init__(self, kind: str | None, number: int) -> None:
        self._kind = kind
        self._number = number
        self._armed = False
        self.counts = {"line": 0, "write": 0}

    def install(self) -> None:
        """From now on every new thread of this process is watched; to be called before there is one."""
        for name in _WRITES:
            setattr(os, name, self._torn(getattr(os, name)))
        threading.settrace(self._trace)

    def watch(self, work: Callable[[], T]) -> T:
        """Runs `work` armed."""
        self._armed = True
        sys.settrace(self._trace)
        try:
            return work()
        finally:
            sys.settrace(None)
            self._armed = False

    def _trace(
        self, frame: FrameType, event: str, argument: object
    ) -> Any:  # the interpreter's own signature
        if frame.f_globals.get("__name__", "").startswith(_OWN):
            return None
        if event == "line" and self._armed:
            self._reached("line")
        return self._trace

    def _reached(self, kind: str) -> bool:
        self.counts[kind] += 1
        hit = self._kind == kind and self.counts[kind] == self._number
        if hit and kind == "line":
            die()
        return hit

    def _torn(self, write: Callable[..., int]) -> Callable[..., int]:
        def torn(descriptor: int, content: Any, *rest: int) -> int:
            if self._armed and self._reached("write"):
                write(descriptor, _first_half(content), *rest)
                die()
            return write(descriptor, content, *rest)

        return torn


def die() -> None:
    """Ends this process as kill -9 does: no handler, no buffer, no lock is seen to."""
    os.kill(os.getpid(), signal.SIGKILL)


def _first_half(content: Any) -> Any:
    if isinstance(content, list | tuple):
        return [_first_half(content[0])] if len(content) == 1 else list(content[: len(content) // 2])
    view = memoryview(content).cast("B")
    half = len(view) // 2
    return view[: half // PAGE * PAGE or half]  # whole pages where there are any, for direct I/O


def _run(backend_class: type[Backend[Any]], request: dict[str, Any], answer: int) -> None:
    """The forked child: opens the store, prepares, acts and dies."""
    point = CrashPoint(*(request["kill"] or (None, 0)))
    point.install()
    backend = backend_class(parse_options(backend_class.config_class, request["options"], "crash child"))
    host = RecordingHost(capacity_bytes=request["capacity_bytes"], deadline_s=30.0, max_in_flight=1)
    store = Store(backend, host, backend.open(host) or backend.capabilities, request["options"])
    statuses = [_operate(store, operation) for operation in request["prepare"]]
    statuses += point.watch(lambda: [_operate(store, operation) for operation in request["act"]])
    os.write(answer, json.dumps({"statuses": statuses, "counts": point.counts}).encode())
    die()


def _operate(store: Store, operation: Sequence[Any]) -> str:
    name, key = operation[0], storage_key(operation[1])
    if name == "delete":
        return store.delete(key).status.value
    return store.put(key, value_of(key, operation[2], operation[3])).status.value


def _fork(backend_class: type[Backend[Any]], request: dict[str, Any]) -> dict[str, Any]:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            _run(backend_class, request, writable)
        except BaseException as error:  # noqa: BLE001 (reported to the parent, whatever it is)
            os.write(writable, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(1)
    os.close(writable)
    with open(readable, "rb") as reader:
        told = reader.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(told) if told else {"killed": True}
    return result


def main() -> None:
    """Serves requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        backend_class: Any = import_module(request["module"])
        for name in request["class"].split("."):
            backend_class = getattr(backend_class, name)
        sys.stdout.write(json.dumps(_fork(backend_class, request)) + "\n")
        sys.stdout.flush()
