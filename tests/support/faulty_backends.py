"""Backends that misbehave on command: a dict-backed store whose calls can be hung, failed or counted."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from cache_scenario import Recorder, config_of, engine_of

from lmcache_core.engine import CacheEngine
from lmcache_core.registry import Registry, discover
from lmcache_core.sdk import (
    Backend,
    BackendSpec,
    BackendStats,
    BackendUnavailable,
    Call,
    Capabilities,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Status,
    StorageKey,
)

PATIENCE_S = 20.0  # where nothing hangs


class Controls:
    """What a test turns. Shared by every instance of the backend made from one registry."""

    def __init__(self) -> None:
        self.values: dict[StorageKey, tuple[bytes, StorageKey | None]] = {}
        self.calls: Counter[str] = Counter()
        self.items: Counter[str] = Counter()
        self.copies: Counter[StorageKey] = Counter()  # the token that a read of each key tells
        self.open_error: Exception | None = None
        self.fail: Callable[[str, StorageKey], bool] = lambda op, key: False
        self.room: int | None = None  # bytes of values; a put beyond them finds the store full
        self.before_read: Callable[[StorageKey, int], None] = lambda key, offset: None
        self.gates: dict[str, threading.Event] = {}  # op → the call waits until it is set
        self.entered: dict[str, threading.Event] = {}
        self.capabilities = Capabilities(
            medium="network", delete=True, scan=True, persistent=True, max_in_flight=2
        )
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of all values."""
        with self.lock:
            return sum(len(value) for value, _ in self.values.values())

    def hang(self, op: str) -> threading.Event:
        """From now on `op` waits; returns the event that is set once a call is inside."""
        self.gates[op] = threading.Event()
        self.entered[op] = threading.Event()
        return self.entered[op]

    def let_go(self, op: str) -> None:
        self.gates.pop(op).set()


class FaultyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No options."""


def faulty(controls: Controls) -> Registry:
    """The installed plugins and one more, `faulty`, that obeys `controls`."""

    class Faulty(Backend[FaultyConfig]):
        config_class = FaultyConfig

        def __init__(self, config: FaultyConfig) -> None:
            self._host: Host | None = None

        @property
        def capabilities(self) -> Capabilities:
            return controls.capabilities

        def open(self, host: Host) -> None:
            self._enter("open", 0)
            if controls.open_error is not None:
                raise controls.open_error

        def close(self) -> None:
            controls.calls["close"] += 1

        def put_many(self, items: Sequence[Item], call: Call) -> None:
            self._enter("put", len(items))
            for i, item in enumerate(items):
                if not self._fails("put", item.key, call, i):
                    value = b"".join(bytes(view.host or b"") for view in item.views)
                    if controls.room is not None and controls.nbytes + len(value) > controls.room:
                        call.done(i, Outcome(status=Status.FULL))
                        continue
                    with controls.lock:
                        controls.values[item.key] = (value, item.parent)
                    call.done(i, Outcome(status=Status.OK, nbytes=len(value)))

        def get_many(self, items: Sequence[Item], call: Call) -> None:
            self._enter("get", len(items))
            for i, item in enumerate(items):
                if self._fails("get", item.key, call, i):
                    continue
                controls.before_read(item.key, item.offset)
                with controls.lock:
                    value, _ = controls.values.get(item.key, (None, None))
                if value is None:
                    call.done(i, Outcome(status=Status.MISS))
                    continue
                if not item.whole:
                    value = value[item.offset : item.offset + item.nbytes]
                if len(value) > item.nbytes:
                    call.done(i, Outcome(status=Status.TOO_SMALL, nbytes=len(value)))
                    continue
                done = 0
                for view in item.views:
                    piece = value[done : done + view.nbytes]
                    ctypes.memmove(view.address, piece, len(piece))
                    done += len(piece)
                token = controls.copies.get(item.key)
                call.done(i, Outcome(status=Status.OK, nbytes=len(value), token=token))

        def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
            self._enter("stat", len(keys))
            for i, key in enumerate(keys):
                if not self._fails("stat", key, call, i):
                    value, _ = controls.values.get(key, (None, None))
                    status = Status.MISS if value is None else Status.OK
                    call.done(i, Outcome(status=status, nbytes=len(value or b"")))

        def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
            self._enter("delete", len(keys))
            for i, key in enumerate(keys):
                if not self._fails("delete", key, call, i):
                    gone = controls.values.pop(key, None)
                    call.done(i, Outcome(status=Status.MISS if gone is None else Status.OK))

        def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
            self._enter("scan", 0)
            return Page(
                entries=[
                    Entry(key=key, nbytes=len(value), parent=parent)
                    for key, (value, parent) in controls.values.items()
                    if key.startswith(prefix)
                ]
            )

        def stats(self) -> BackendStats:
            return BackendStats(entries=len(controls.values))

        def _enter(self, op: str, items: int) -> None:
            controls.calls[op] += 1
            controls.items[op] += items
            gate = controls.gates.get(op)
            if gate is not None:
                controls.entered[op].set()
                gate.wait(60.0)

        def _fails(self, op: str, key: StorageKey, call: Call, i: int) -> bool:
            if not controls.fail(op, key):
                return False
            error = BackendUnavailable("told to fail", op=op, key=key)
            call.done(i, Outcome(status=Status.FAILED, error=error))
            return True

    registry = discover()
    registry.add(BackendSpec(name="faulty", target="faulty_backends:Faulty", api=(1, 0)), Faulty)
    return registry


def remote(**settings: object) -> dict[str, object]:
    """A tier of such a backend, for a config."""
    return {
        "name": "remote",
        "backend": "faulty",
        "capacity": "64MiB",
        "deadline": PATIENCE_S,
        "breaker": {"failures": 1000},
        **settings,
    }


def build(
    controls: Controls, *tiers: dict[str, object], recorder: Recorder | None = None, **settings: object
) -> CacheEngine:
    return engine_of(config_of(*tiers, **settings), registry=faulty(controls), recorder=recorder)
