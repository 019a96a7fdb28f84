"""Broken in how they count and share their room: over time, over opening again, on a disk that is full."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance_backends.catalogue import breaks
from conformance_backends.files import FileBackend
from conformance_backends.memory import FULL, MISS, MemoryBackend
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import BackendStats, Call, Capabilities, Host, Outcome, Status


@breaks("the_bound_is_not_exceeded_for_a_moment", also=("the_bound_is_never_exceeded",))
class ForgetsThatOldAndNewExistTogether(FileBackend):
    def needed(self, key: StorageKey, nbytes: int) -> int:
        return sum(self.lengths.values()) - self.lengths.get(key, 0) + nbytes


@breaks(
    "the_bound_is_never_exceeded",
    also=(
        "the_bound_holds_for_what_was_there_before",
        "the_bound_is_not_exceeded_for_a_moment",
    ),
)
class DoesNotCountTemporaries(FileBackend):
    """Stays under the bound as it counts, and over it as the disk does."""

    def store(self, key: StorageKey, value: bytes) -> None:
        super().store(key, value)
        (self.path / "journal").write_bytes(4 * value)

    def index(self) -> None:
        super().index()
        self.lengths.pop("journal", None)


@breaks("the_bound_holds_for_what_was_there_before")
class ForgetsItsRoomWhenReopened(FileBackend):
    """Counts what this process put; what lay there at open isn't counted against the bound."""

    before = 0

    def open(self, host: Host) -> Capabilities | None:
        narrowed = super().open(host)
        self.before = sum(self.lengths.values())
        return narrowed

    def needed(self, key: StorageKey, nbytes: int) -> int:
        return super().needed(key, nbytes) - self.before


@breaks(
    "a_put_that_finds_the_medium_full_leaves_nothing_behind",
    also=("a_full_medium_is_full_and_loses_nothing",),
)
class LeavesItsTemporaryWhenFull(FileBackend):
    def clean_up(self, temporary: Path) -> None:
        return


@breaks("overwriting_costs_no_room", also=("calls_that_succeed_leave_nothing_behind",))
class LeaksRoomOnEachOverwrite(MemoryBackend):
    """Adds what is put and never subtracts what that replaced, until the store is empty."""

    used = 0

    def used_bytes(self) -> int:
        return self.used

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        if self.capacity_bytes is not None and self.used + len(value) > self.capacity_bytes:
            return FULL
        self.values[key] = value
        self.used += len(value)
        return Outcome(status=Status.OK, nbytes=len(value))

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.lock:
            value = self.values.pop(key, None)
            self.used = self.used - len(value or b"") if self.values else 0
        return MISS if value is None else Outcome(status=Status.OK)


@breaks("refused_puts_cost_no_room")
class KeepsWhatItReservedForARefusedPut(MemoryBackend):
    reserved = 0

    def has_room(self, key: StorageKey, nbytes: int) -> bool:
        fits = super().has_room(key, nbytes + self.reserved)
        if not fits and nbytes < 64 * 4096:
            self.reserved += nbytes
        return fits


@breaks("what_is_charged_explains_that_the_store_is_full")
class ChargesNothing(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        outcome = super().keep(key, value)
        return replace(outcome, stored=0) if outcome.status is Status.OK else outcome


@breaks("stats_count_what_is_stored")
class SubtractsTwice(MemoryBackend):
    """What was replaced is subtracted when it is replaced, and once more with its key."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.too_much = 0
        self.numbers = itertools.count()

    def delete_one(self, key: StorageKey) -> Outcome:
        outcome = super().delete_one(key)
        if outcome.status is Status.OK:
            self.too_much += 1
        return outcome

    def stats(self) -> BackendStats:
        known = super().stats()
        return replace(known, used_bytes=known.used_bytes - self.too_much)


@breaks(
    "a_full_medium_is_full_and_loses_nothing",
    also=("a_put_that_finds_the_medium_full_leaves_nothing_behind",),
)
class TriesAgainWhileTheDiskIsFull(FileBackend):
    """As long as the call has time, which is somebody else's."""

    def refusal(self, error: OSError) -> Outcome:
        if error.errno == errno.ENOSPC:
            with self.medium.changed:
                self.medium.changed.wait_for(lambda: self.medium.fault != "full", 5.0)
        return super().refusal(error)


@breaks("a_put_that_finds_the_medium_full_leaves_nothing_behind")
class KeepsTheRoomOfWhatFailed(FileBackend):
    reserved = 0

    def needed(self, key: StorageKey, nbytes: int) -> int:
        return super().needed(key, nbytes) + self.reserved

    def store(self, key: StorageKey, value: bytes) -> None:
        self.reserved += len(value)
        super().store(key, value)
        self.reserved -= len(value)

    def stats(self) -> BackendStats:
        known = super().stats()
        return replace(known, used_bytes=known.used_bytes + self.reserved)


class _SharedFiles(FileBackend):
    """Asks the directory instead of what it remembers, since others use it, too."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, shared=True)

    def take(self) -> None:
        return

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            try:
                nbytes = (self.path / key).stat().st_size
                call.done(index, Outcome(status=Status.OK, nbytes=nbytes))
            except FileNotFoundError:
                call.done(index, MISS)

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.names:
            self.index()
        return super().delete_one(key)


@breaks("an_overwrite_by_another_client_is_seen")
class SweepsWhatOthersAreWriting(_SharedFiles):
    pass


@breaks("an_overwrite_by_another_client_is_seen", also=("what_killed_writers_leave_behind_is_swept",))
class WritesBesideUnderOneName(_SharedFiles):
    """The number of its temporary file is unique in one client, and the same in the next."""

    def sweep(self) -> None:
        return
