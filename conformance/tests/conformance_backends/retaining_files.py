"""Correct persistent backends that pin, and that evict by themselves: what a restart must not confuse."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance_backends.files import FileBackend
from conformance_backends.memory import FULL, MISS
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Capabilities, Entry, Host, Item, Outcome, Page, Status

_EVICTED = "the store made room"


class PinningFiles(FileBackend):
    """Pins, which is little where the core evicts: the value is there, and stays until it is deleted."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, pin=True)

    def pin_many(self, keys: Sequence[StorageKey], ttl_s: float, call: Call) -> None:
        for index, key in enumerate(keys):
            call.remaining()
            call.done(index, self.pin_one(key, ttl_s))

    def pin_one(self, key: StorageKey, ttl_s: float) -> Outcome:
        with self.names:
            nbytes = self.lengths.get(key)
        return MISS if nbytes is None else Outcome(status=Status.OK, nbytes=nbytes)


class EvictingFiles(PinningFiles):
    """Removes what was used longest ago, unless it is pinned, and tells each loss with the copy's token.

    `lengths` is in the order of use. A copy's token is its file's time stamp, and so survives a restart.
    """

    host: Host

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.pins: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.newest = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, self_evicting=True)

    def open(self, host: Host) -> Capabilities | None:
        self.host = host
        return super().open(host)

    def index(self) -> None:
        super().index()
        self.tokens = {name: (self.path / name).stat().st_mtime_ns for name in self.lengths}
        self.lengths = {
            name: self.lengths[name] for name in sorted(self.lengths, key=self.tokens.__getitem__)
        }
        self.newest = max(self.tokens.values(), default=0)

    def put_one(self, item: Item) -> Outcome:
        value = b"".join(bytes(view.host or b"") for view in item.views)
        lost: list[tuple[StorageKey, int | None]] = []
        try:
            with self.lock:
                if not self.make_room(item.key, len(value), lost):
                    return FULL
                self.store(item.key, value)
                with self.names:
                    self.lengths.pop(item.key, None)  # it comes last, as the one used last
                    self.lengths[item.key] = len(value)
                token = self.tokens[item.key]
        finally:
            if lost:
                self.host.lost(lost, _EVICTED)
        return Outcome(status=Status.OK, nbytes=len(value), token=token)

    def make_room(self, key: StorageKey, nbytes: int, lost: list[tuple[StorageKey, int | None]]) -> bool:
        """Under the lock: evicts until the value fits in beside its old copy; nothing if that won't do."""
        bound, now = self.capacity_bytes, time.monotonic()
        if bound is None:
            return True
        victims, excess = [], self.needed(key, nbytes) - bound
        with self.names:
            lengths = list(self.lengths.items())
        for other, length in lengths:
            if excess <= 0:
                break
            if other != key and self.pins.get(other, 0.0) <= now:
                victims.append(StorageKey(other))
                excess -= length
        if excess > 0:
            return False
        for victim in victims:
            with self.names:
                self.remove(victim)
                self.lengths.pop(victim, None)
            lost.append((victim, self.tokens.pop(victim)))
        return True

    def write(self, path: Path, value: bytes) -> None:
        super().write(path, value)
        self.newest = max(self.newest + 1, time.time_ns())
        os.utime(path, ns=(self.newest, self.newest))

    def store(self, key: StorageKey, value: bytes) -> None:
        super().store(key, value)
        self.tokens[key] = self.newest

    def get_one(self, item: Item) -> Outcome:
        outcome = super().get_one(item)
        return self.used(item.key, outcome) if outcome.status is Status.OK else outcome

    def used(self, key: StorageKey, outcome: Outcome) -> Outcome:
        with self.names:
            if key in self.lengths:
                self.lengths[key] = self.lengths.pop(key)
        return outcome

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.done(index, self.stat_one(key))

    def stat_one(self, key: StorageKey) -> Outcome:
        """Asks the medium: what evicts by itself may have done so behind this process, too."""
        try:
            nbytes = (self.path / key).stat().st_size
        except FileNotFoundError:
            return MISS
        return self.used(key, Outcome(status=Status.OK, nbytes=nbytes))

    def pin_one(self, key: StorageKey, ttl_s: float) -> Outcome:
        with self.lock:
            if key in self.lengths:
                self.pins[key] = max(self.pins.get(key, 0.0), time.monotonic() + ttl_s)
        return super().pin_one(key, ttl_s)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        page = super().scan(call, prefix, cursor, limit)
        entries = [
            Entry(key=entry.key, nbytes=entry.nbytes, token=self.tokens.get(entry.key))
            for entry in page.entries
        ]
        return Page(entries=entries, cursor=page.cursor)
