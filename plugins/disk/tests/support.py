"""What the disk backend's tests share: a backend with a small vocabulary, and files that can be watched."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_core.sdk import DeadlineExceeded, Item, Outcome, Status, StorageKey, View
from lmcache_core_disk.backend import DiskBackend
from lmcache_core_disk.config import DiskConfig
from lmcache_core_disk.files import Files

PAGE = 4096
MIB = 1 << 20


def content(seed: int, nbytes: int) -> bytes:
    """Bytes whose every page says which value and which page it is: a torn value shows."""
    return b"".join(
        struct.pack("<QQ", seed, page).ljust(PAGE, bytes([seed % 251])) for page in range(nbytes // PAGE)
    )


class Memory:
    """Page-aligned memory of the caller's, in one view or several."""

    def __init__(self, nbytes: int, *, pieces: int = 1) -> None:
        self._map = mmap.mmap(-1, max(nbytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(self._map)[:nbytes]
        pages = nbytes // PAGE
        cuts = [pages * i // pieces * PAGE for i in range(pieces + 1)]
        self.views = [
            View(start, end - start, self.memory, start)
            for start, end in itertools.pairwise(cuts)
            if end > start
        ]


@dataclass
class Call:
    """One batch's call: outcomes by index, each settled once."""

    deadline: float = field(default_factory=lambda: time.monotonic() + 60)
    cancelled: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    on_done: Callable[[int], None] = lambda index: None

    def remaining(self) -> float:
        left = self.deadline - time.monotonic()
        if self.cancelled or left <= 0:
            raise DeadlineExceeded("no time left")
        return left

    def done(self, index: int, outcome: Outcome) -> None:
        assert index not in self.outcomes, f"item {index} was settled twice"
        self.outcomes[index] = outcome
        self.on_done(index)


@dataclass
class Host:
    """A tier of the given capacity that remembers what it was told of lost copies."""

    capacity_bytes: int | None = 16 * MIB
    parts: tuple[str, ...] = ("00112233aabbccdd",)
    tier: str = "disk"
    deadline_s: float = 0.05
    max_in_flight: int = 4
    lost_copies: list[tuple[str, int | None, str]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)  # why all copies were lost, each time

    @property
    def pool(self) -> object:
        raise AssertionError("the disk backend needs no pool")

    def lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        self.lost_copies.extend((key, token, reason) for key, token in copies)

    def lost_all(self, reason: str) -> None:
        self.forgotten.append(reason)


class Disk:
    """An open backend, one item a call."""

    def __init__(
        self, path: Path, *, files: Files | None = None, host: Host | None = None, **options: object
    ):
        self.host = host if host is not None else Host()
        self.path = path
        self.backend = DiskBackend(DiskConfig(path=path, **options), files=files)  # type: ignore[arg-type]
        self.backend.open(self.host)

    def put(
        self, key: str, seed: int, pages: int = 1, *, parent: str | None = None, pieces: int = 1
    ) -> Outcome:
        memory = Memory(pages * PAGE, pieces=pieces)
        memory.memory[:] = content(seed, pages * PAGE)
        item = Item(StorageKey(key), memory.views, parent=StorageKey(parent) if parent else None)
        call = Call()
        self.backend.put_many([item], call)
        return call.outcomes[0]

    def get(
        self, key: str, pages: int = 8, *, offset: int = 0, whole: bool = True, pieces: int = 1
    ) -> tuple[Outcome, bytes]:
        memory = Memory(pages * PAGE, pieces=pieces)
        call = Call()
        self.backend.get_many([Item(StorageKey(key), memory.views, offset=offset, whole=whole)], call)
        return call.outcomes[0], bytes(memory.memory[: call.outcomes[0].nbytes])

    def holds(self, key: str, seed: int, pages: int = 1) -> bool:
        outcome, value = self.get(key, max(pages, 8))
        return outcome.status is Status.OK and value == content(seed, pages * PAGE)

    def delete(self, key: str) -> Outcome:
        call = Call()
        self.backend.delete_many([StorageKey(key)], call)
        return call.outcomes[0]

    def stat(self, key: str) -> Outcome:
        call = Call()
        self.backend.stat_many([StorageKey(key)], call)
        return call.outcomes[0]

    def keys(self, prefix: str = "", limit: int = 1000) -> list[str]:
        keys: list[str] = []
        cursor: str | None = None
        while True:
            page = self.backend.scan(Call(), prefix, cursor, limit)
            keys.extend(entry.key for entry in page.entries)
            if (cursor := page.cursor) is None:
                return keys

    def slot_files(self) -> list[Path]:
        return sorted(self.path.glob("shard-*/slots/*/*"))

    def close(self) -> None:
        self.backend.close()


class ProbedFiles(Files):
    """Calls `before(name, argument)` ahead of every system call and `after(name)` behind it.

    `before` may raise an OSError in the call's place, or end the process.
    """

    def __init__(
        self,
        before: Callable[[str, object], None] = lambda name, argument: None,
        after: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.before = before
        self.after = after

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name.startswith("_") or name in ("before", "after"):
            return value

        def call(*arguments: object, **options: object) -> object:
            self.before(name, arguments[0])
            try:
                return value(*arguments, **options)
            finally:
                self.after(name)

        return call


def occupied_nbytes(root: Path) -> int:
    """What the directory occupies, itself included, as `du` counts it."""
    total, pending = 0, [str(root)]
    while pending:
        path = pending.pop()
        total += os.lstat(path).st_blocks * 512
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
