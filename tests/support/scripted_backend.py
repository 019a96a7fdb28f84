"""A scripted backend: what it does with a call is a function, put together from those here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lmcache_core.frame import FrameHeader, FrameKind, Segment, seal
from lmcache_core.identity.keys import StorageKey, chunk_key
from lmcache_core.storage import (
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Item,
    Outcome,
    Page,
    Status,
)

PATIENCE_S = 30.0  # of a test that fails
PART = "0123456789abcdef"
OK = Outcome(status=Status.OK)
MISS = Outcome(status=Status.MISS)

Behaviour = Callable[[Sequence[Any], Call], None]


def key_of(number: int) -> StorageKey:
    return chunk_key(PART, number.to_bytes(32, "big"))


def frame_of(number: int, *, payload_nbytes: int = 4096, part: str = PART) -> bytearray:
    """A sealed frame under `key_of(number)`, its payload made of `number`."""
    header = FrameHeader(
        kind=FrameKind.CHUNK,
        key=key_of(number),
        parent=None,
        part=part,
        content_format="kv float32 64",
        first_token=0,
        num_tokens=1,
        segments=(Segment(payload_nbytes, payload_nbytes), Segment(payload_nbytes, payload_nbytes)),
    )
    memory = bytearray([number % 256]) * header.frame_nbytes
    seal(memoryview(memory), header)
    return memory


FRAME_NBYTES = len(frame_of(0))


def wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "waited in vain"


class NoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scripted backend has none."""


def settle_all(outcome: Outcome = OK) -> Behaviour:
    def behave(targets: Sequence[Any], call: Call) -> None:
        for index in range(len(targets)):
            call.done(index, outcome)

    return behave


def read_frames(targets: Sequence[Item], call: Call) -> None:
    """A get that finds, for each item, the frame that belongs to its key."""
    for index, item in enumerate(targets):
        fill(item, frame_of(int(item.key[-8:], 16)))
        call.done(index, Outcome(status=Status.OK, nbytes=FRAME_NBYTES))


def fill(item: Item, content: bytes | bytearray) -> None:
    for view in item.views:
        memory = view.host
        assert memory is not None
        piece, content = content[: len(memory)], content[len(memory) :]
        memory[: len(piece)] = piece


def raising(error: BaseException) -> Behaviour:
    def behave(targets: Sequence[Any], call: Call) -> None:
        raise error

    return behave


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """The first call behaves as the first, and so on; the last is repeated."""
    left = list(behaviours)

    def behave(targets: Sequence[Any], call: Call) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(targets, call)

    return behave


class Hang:
    """Blocks each call until `let_go`, then behaves as `then`. Deaf to deadlines and cancellation."""

    def __init__(self, then: Behaviour | None = None) -> None:
        self.entered = threading.Event()
        self.calls: list[Call] = []
        self._called = threading.Condition()
        self._go = threading.Event()
        self._then = then if then is not None else settle_all()

    def __call__(self, targets: Sequence[Any], call: Call) -> None:
        with self._called:
            self.calls.append(call)
            self._called.notify_all()
        self.entered.set()
        wait(self._go)
        self._then(targets, call)

    def wait_for_calls(self, count: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: len(self.calls) >= count, PATIENCE_S), "waited in vain"

    def let_go(self) -> None:
        self._go.set()


class ScriptedBackend(Backend[NoOptions]):
    """Does what its attributes say, and counts what was asked."""

    config_class = NoOptions

    def __init__(self, config: NoOptions | None = None) -> None:
        self.offers = Capabilities(medium="memory", delete=True, scan=True, ranged=True, max_in_flight=64)
        self.get: Behaviour = read_frames
        self.put: Behaviour = settle_all()
        self.stat: Behaviour = settle_all(MISS)
        self.delete: Behaviour = settle_all()
        self.pages: Callable[[Call, str, str | None, int], Page] = lambda *_: Page(entries=[])
        self.on_open: Callable[[object], Capabilities | None] = lambda host: None
        self.on_close: Callable[[], None] = lambda: None
        self.on_stats: Callable[[], BackendStats] = BackendStats
        self.asked: list[tuple[str, list[Any]]] = []
        self.closed = threading.Event()

    @property
    def capabilities(self) -> Capabilities:
        return self.offers

    def open(self, host: object) -> Capabilities | None:
        return self.on_open(host)

    def close(self) -> None:
        self.closed.set()
        self.on_close()

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        self.asked.append(("put", [item.key for item in items]))
        self.put(items, call)

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        self.asked.append(("get", [item.key for item in items]))
        self.get(items, call)

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        self.asked.append(("stat", list(keys)))
        self.stat(keys, call)

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        self.asked.append(("delete", list(keys)))
        self.delete(keys, call)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        self.asked.append(("scan", [prefix, cursor]))
        return self.pages(call, prefix, cursor, limit)

    def stats(self) -> BackendStats:
        return self.on_stats()
