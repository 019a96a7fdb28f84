"""A correct backend over a dictionary, cut into small methods so that a broken one replaces just one."""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from lmcache_core.errors import BackendError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import (
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Status,
    View,
)

T = TypeVar("T")
MISS = Outcome(status=Status.MISS)
FULL = Outcome(status=Status.FULL)


def failed(message: str) -> Outcome:
    return Outcome(status=Status.FAILED, error=BackendError(message))


def write_at(address: int, content: bytes) -> None:
    ctypes.memmove(address, bytes(content), len(content))


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_value_bytes: int = 1536 * 1024


class MemoryBackend(Backend[MemoryConfig]):
    config_class = MemoryConfig

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.values: dict[str, bytes] = {}
        self.capacity_bytes: int | None = None
        self.lock = threading.Lock()  # guards the values

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            medium="memory",
            delete=True,
            scan=True,
            ranged=True,
            max_value_bytes=self.config.max_value_bytes,
            max_batch=24,
            max_in_flight=6,
        )

    def open(self, host: Host) -> Capabilities | None:
        self.capacity_bytes = host.capacity_bytes
        return None

    def close(self) -> None:
        with self.lock:
            self.values.clear()

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        self.each(items, call, self.put_one)

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        self.each(items, call, self.get_one)

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        self.each(keys, call, self.stat_one)

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        self.each(keys, call, self.delete_one)

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        for index, thing in enumerate(things):
            call.remaining()
            call.done(index, one(thing))

    def put_one(self, item: Item) -> Outcome:
        if item.nbytes > self.config.max_value_bytes:
            return FULL
        value = self.gather(item.views)
        with self.lock:
            return self.keep(item.key, value)

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        """Under the lock: replaces the value if there is room."""
        if not self.has_room(key, len(value)):
            return FULL
        self.values[self.name(key)] = value
        return Outcome(status=Status.OK, nbytes=len(value))

    def has_room(self, key: StorageKey, nbytes: int) -> bool:
        used = self.used_bytes() - len(self.values.get(self.name(key), b"")) + nbytes
        return self.capacity_bytes is None or used <= self.capacity_bytes

    def used_bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def get_one(self, item: Item) -> Outcome:
        value = self.read(item.key)
        if value is None:
            return self.absent(item)
        if item.whole and len(value) > item.nbytes:
            return self.too_small(item, value)
        part = value if item.whole else self.cut(value, item)
        if not item.whole and len(part) < item.nbytes:
            return MISS
        self.spread(part, item.views)
        return Outcome(status=Status.OK, nbytes=len(part))

    def read(self, key: StorageKey) -> bytes | None:
        with self.lock:
            return self.values.get(self.name(key))

    def absent(self, item: Item) -> Outcome:
        return MISS

    def too_small(self, item: Item, value: bytes) -> Outcome:
        return Outcome(status=Status.TOO_SMALL, nbytes=len(value))

    def cut(self, value: bytes, item: Item) -> bytes:
        return value[item.offset : item.offset + item.nbytes]

    def stat_one(self, key: StorageKey) -> Outcome:
        value = self.values.get(self.name(key))
        return MISS if value is None else Outcome(status=Status.OK, nbytes=len(value))

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.lock:
            value = self.values.pop(self.name(key), None)
        return MISS if value is None else Outcome(status=Status.OK)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.lock:
            keys = sorted(key for key in self.values if key.startswith(prefix))
            start = 0 if cursor is None else bisect_right(keys, cursor)
            chosen = keys[start : start + limit]
            entries = [Entry(key=StorageKey(key), nbytes=len(self.values[key])) for key in chosen]
        return Page(entries=entries, cursor=chosen[-1] if start + limit < len(keys) else None)

    def stats(self) -> BackendStats:
        with self.lock:
            return BackendStats(entries=len(self.values), used_bytes=self.used_bytes())

    def name(self, key: StorageKey) -> str:
        """The key's name in the medium."""
        return key

    def gather(self, views: Sequence[View]) -> bytes:
        return b"".join(bytes(view.host or b"") for view in views)

    def spread(self, part: bytes, views: Sequence[View]) -> None:
        position = 0
        for view in views:
            piece = part[position : position + view.nbytes]
            write_at(view.address, piece)
            position += len(piece)
