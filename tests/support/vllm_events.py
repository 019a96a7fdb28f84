"""Reads the KV events that a vLLM engine has published, as a router does that missed some."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from msgspec import msgpack

PATIENCE_S = 60.0
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Event:
    type: str
    fields: dict[str, Any]

    @property
    def medium(self) -> object:
        return self.fields.get("medium")

    @property
    def blocks(self) -> list[bytes]:
        return list(self.fields.get("block_hashes", ()))


class Router:
    """Asks the publisher of an engine that was started with `config`."""

    def __init__(self, folder: Path) -> None:
        self._replay = f"ipc://{folder}/replay"
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/live",
            "replay_endpoint": self._replay,
        }

    def events(self, enough: Callable[[Sequence[Event]], bool]) -> list[Event]:
        """All events so far. vLLM publishes on a thread of its own: asks until there are enough."""
        until = time.monotonic() + PATIENCE_S
        while not enough(events := self._ask()):
            assert time.monotonic() < until, f"these are not the events: {events}"
        return events

    def _ask(self) -> list[Event]:
        events = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.rcvtimeo = 0, int(PATIENCE_S * 1000)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", bytes(8)])  # from the first batch on
            while (frames := dealer.recv_multipart())[-2] != _END:
                _, batch, *_ = msgpack.decode(frames[-1])
                events += [Event(fields.pop("type"), fields) for fields in batch]
        return events


@contextmanager
def router() -> Iterator[Router]:
    """A `Router`, over sockets whose paths are short enough (pytest's folders are not)."""
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    try:
        yield Router(folder)
    finally:
        shutil.rmtree(folder)


def of(events: Sequence[Event], kind: str, medium: str) -> list[Event]:
    return [event for event in events if (event.type, event.medium) == (kind, medium)]


def blocks(events: Sequence[Event]) -> list[bytes]:
    return [block for event in events for block in event.blocks]
