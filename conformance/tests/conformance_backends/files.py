"""A correct persistent backend, a file for each value, and the broken ones that crash properties catch."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec

from conformance_backends.catalogue import RACES, breaks
from conformance_backends.memory import FULL, MISS, write_at
from lmcache_core.errors import BackendUnavailable, NotSupported, PermissionDenied
from lmcache_core.identity.keys import KEY_PATTERN, StorageKey
from lmcache_core.sdk import status_for_errno
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
)

_TEMPORARY = ".writing-"
_BLOCK = 4096


class FileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Path


class Medium:
    """What stands between this backend and the system: a fault can be put there for a while."""

    _all: ClassVar[dict[Path, Medium]] = {}

    def __init__(self) -> None:
        self.fault = ""
        self.changed = threading.Condition()  # guards the fault

    @classmethod
    def of(cls, path: Path) -> Medium:
        return cls._all.setdefault(path, Medium())

    @contextmanager
    def faulty(self, fault: str) -> Iterator[None]:
        self.set(fault)
        try:
            yield
        finally:
            self.set("")

    def set(self, fault: str) -> None:
        with self.changed:
            self.fault = fault
            self.changed.notify_all()

    def use(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.fault != "stalled")

    def change(self) -> None:
        self.use()
        if self.fault == "read-only":
            raise OSError(errno.EROFS, "read-only file system")

    def write(self, descriptor: int, value: memoryview) -> None:
        """Writes all of it; a full medium takes half."""
        full = self.fault == "full"
        rest = value[: len(value) // 2] if full else value
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if full:
            raise OSError(errno.ENOSPC, "no space left on device")


class FileBackend(Backend[FileConfig]):
    config_class = FileConfig

    def __init__(self, config: FileConfig) -> None:
        self.path = config.path
        self.medium = Medium.of(config.path)
        self.lengths: dict[str, int] = {}
        self.capacity_bytes: int | None = None
        self.numbers = itertools.count()
        self.owner = -1
        self.lock = threading.Lock()  # held by the change under way: one at a time
        self.names = threading.Lock()  # guards the lengths and all names; never held in a wait

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="file", delete=True, scan=True, persistent=True, max_in_flight=4)

    def open(self, host: Host) -> Capabilities | None:
        self.capacity_bytes = host.capacity_bytes
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.medium.change()
            self.take()
            self.sweep()
            self.index()
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise PermissionDenied(f"{self.path}: {error}", op="open") from error
            raise BackendUnavailable(f"{self.path}: {error}", op="open") from error
        return None

    def take(self) -> None:
        """Makes this the only one that uses the directory, until it is closed or its process ends."""
        self.owner = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BackendUnavailable(f"{self.path} is used by another store", op="open") from error

    def sweep(self) -> None:
        for path in self.path.glob(f"{_TEMPORARY}*"):
            path.unlink()

    def index(self) -> None:
        for path in self.path.iterdir():
            if path.is_file() and KEY_PATTERN.fullmatch(path.name):
                self.lengths[path.name] = path.stat().st_size

    def close(self) -> None:
        owner, self.owner = self.owner, -1
        if owner >= 0:
            os.close(owner)

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            try:
                call.done(index, self.put_one(item))
            except OSError as error:
                call.done(index, self.refusal(error))

    def refusal(self, error: OSError) -> Outcome:
        return status_for_errno(error.errno, str(error), op="put")

    def put_one(self, item: Item) -> Outcome:
        value = b"".join(bytes(view.host or b"") for view in item.views)
        with self.lock:
            bound = self.capacity_bytes
            if bound is not None and self.needed(item.key, len(value)) > bound:
                return FULL
            self.store(item.key, value)
            with self.names:
                self.lengths[item.key] = len(value)
        return Outcome(status=Status.OK, nbytes=len(value))

    def needed(self, key: StorageKey, nbytes: int) -> int:
        return sum(self.lengths.values()) + nbytes + 2 * _BLOCK  # old and new exist together

    def store(self, key: StorageKey, value: bytes) -> None:
        """While no other change is under way: written beside, then given its name."""
        temporary = self.path / f"{_TEMPORARY}{os.getpid()}-{next(self.numbers)}"
        try:
            self.write(temporary, value)
        except OSError:
            self.clean_up(temporary)
            raise
        with self.names:
            temporary.rename(self.path / key)
            self.lengths[key] = len(value)

    def clean_up(self, temporary: Path) -> None:
        temporary.unlink(missing_ok=True)

    def write(self, path: Path, value: bytes) -> None:
        self.medium.change()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            self.medium.write(descriptor, memoryview(value))
        finally:
            os.close(descriptor)

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            call.done(index, self.get_one(item))

    def get_one(self, item: Item) -> Outcome:
        if not item.whole:
            return Outcome(status=Status.FAILED, error=NotSupported("no ranges", op="get", key=item.key))
        value = self.read(item.key)
        if value is None:
            return MISS
        if len(value) > item.nbytes:
            return Outcome(status=Status.TOO_SMALL, nbytes=len(value))
        position = 0
        for view in item.views:
            piece = value[position : position + view.nbytes]
            write_at(view.address, piece)
            position += len(piece)
        return Outcome(status=Status.OK, nbytes=len(value))

    def read(self, key: StorageKey) -> bytes | None:
        """The value; one whose file is gone is forgotten."""
        self.medium.use()
        try:
            return (self.path / key).read_bytes()
        except FileNotFoundError:
            with self.names:
                if not (self.path / key).exists():
                    self.lengths.pop(key, None)
            return None

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            with self.names:
                nbytes = self.lengths.get(key)
            call.done(index, MISS if nbytes is None else Outcome(status=Status.OK, nbytes=nbytes))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.remaining()
            try:
                call.done(index, self.delete_one(key))
            except OSError as error:
                call.done(index, self.refusal(error))

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.lock:
            known = key in self.lengths
            if known:
                self.medium.change()
                with self.names:
                    self.remove(key)
                    self.lengths.pop(key, None)
        return Outcome(status=Status.OK) if known else MISS

    def remove(self, key: StorageKey) -> None:
        (self.path / key).unlink()

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.names:
            keys = sorted(k for k in self.lengths if k.startswith(prefix) and (cursor is None or k > cursor))
            entries = [Entry(key=StorageKey(key), nbytes=self.lengths[key]) for key in keys[:limit]]
        return Page(entries=entries, cursor=keys[limit - 1] if len(keys) > limit else None)

    def stats(self) -> BackendStats:
        with self.names:
            used = sum(self.lengths.values())
            return BackendStats(
                entries=len(self.lengths), used_bytes=used, capacity_bytes=self.capacity_bytes
            )


# -- broken --------------------------------------------------------------------------------------

KILLS = (
    "kill_9_during_a_put_leaves_all_of_it_or_nothing",
    "kill_9_during_an_overwrite_leaves_the_old_or_the_new_value",
    "kill_9_during_a_delete_leaves_the_value_or_nothing",
    "kill_9_while_room_is_made_leaves_each_value_whole_or_absent",
)
CHANGES = (
    "a_full_medium_is_full_and_loses_nothing",
    "a_put_that_finds_the_medium_full_leaves_nothing_behind",
    "a_read_only_medium_refuses_writes_and_serves_reads",
)
REOPENS = (
    "values_survive_close_and_reopen",
    "a_put_that_was_acknowledged_survives_kill_9",
    "deleted_values_stay_deleted_after_reopen",
    "what_belongs_to_others_is_neither_listed_nor_touched",
    "the_bound_holds_for_what_was_there_before",
    *KILLS,
)


@breaks("values_survive_close_and_reopen", also=REOPENS)
class ForgetsItsIndex(FileBackend):
    def index(self) -> None:
        return


@breaks("deleted_values_stay_deleted_after_reopen", also=KILLS)
class ForgetsOnlyInMemory(FileBackend):
    def remove(self, key: StorageKey) -> None:
        (self.path / key).rename(self.path / f"deleted-{key}")

    def index(self) -> None:
        for path in self.path.glob("deleted-*"):
            path.rename(path.with_name(path.name.removeprefix("deleted-")))
        super().index()


@breaks(
    "a_put_that_was_acknowledged_survives_kill_9",
    also=(
        *KILLS,
        *RACES,
        *CHANGES,
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "close_does_not_wait_for_a_stalled_call",
        "a_batch_does_nothing_more_once_its_time_is_over",
        "what_lies_in_the_medium_is_what_was_put",
        "lost_events_in_any_order_never_hide_a_newer_copy",
    ),
)
class WritesBehind(FileBackend):
    """Keeps the last value in memory until the next call."""

    behind: tuple[StorageKey, bytes] | None = None

    def store(self, key: StorageKey, value: bytes) -> None:
        self.flush()
        self.behind = (key, value)

    def flush(self) -> None:
        if self.behind is not None:
            super().store(*self.behind)
            self.behind = None

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        with self.lock:
            self.flush()
        super().get_many(items, call)

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        with self.lock:
            self.flush()
        super().delete_many(keys, call)

    def close(self) -> None:
        with self.lock:
            self.flush()
        super().close()


@breaks(
    "kill_9_during_a_put_leaves_all_of_it_or_nothing",
    also=(*KILLS, *RACES, *CHANGES),
)
class WritesNewValuesUnderTheirName(FileBackend):
    def store(self, key: StorageKey, value: bytes) -> None:
        if key in self.lengths:
            super().store(key, value)
        else:
            self.write(self.path / key, value)


@breaks(
    "kill_9_during_an_overwrite_leaves_the_old_or_the_new_value",
    also=(*RACES, *CHANGES),
)
class OverwritesInPlaceOnDisk(FileBackend):
    def store(self, key: StorageKey, value: bytes) -> None:
        if self.lengths.get(key) == len(value):
            self.write(self.path / key, value)
        else:
            super().store(key, value)


@breaks(
    "kill_9_during_an_overwrite_leaves_the_old_or_the_new_value",
    also=(*RACES, *CHANGES),
)
class RemovesTheOldValueFirst(FileBackend):
    def store(self, key: StorageKey, value: bytes) -> None:
        (self.path / key).unlink(missing_ok=True)
        super().store(key, value)


@breaks(
    "kill_9_during_a_delete_leaves_the_value_or_nothing",
    also=RACES,
)
class EmptiesBeforeItRemoves(FileBackend):
    def remove(self, key: StorageKey) -> None:
        os.truncate(self.path / key, 0)
        super().remove(key)


@breaks("what_killed_writers_leave_behind_is_swept", also=())
class NeverSweeps(FileBackend):
    def sweep(self) -> None:
        return


@breaks("close_after_a_failed_open_leaves_nothing")
class LeaksWhenOpenFails(FileBackend):
    descriptor = -1

    def open(self, host: Host) -> Capabilities | None:
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        super().open(host)
        os.close(self.descriptor)
        return None


@breaks("close_after_a_failed_open_leaves_nothing")
class FailsToOpenWithAForeignError(FileBackend):
    def open(self, host: Host) -> Capabilities | None:
        self.path.mkdir(parents=True, exist_ok=True)
        return super().open(host)


@breaks("nothing_survives_close")
class LeavesFilesAlthoughNotPersistent(FileBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, persistent=False)
