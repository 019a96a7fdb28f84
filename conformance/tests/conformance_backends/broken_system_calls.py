"""Broken beneath the surface: waits, stats, owners, and system calls that move less than asked or fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conformance_backends.catalogue import RACES, breaks
from conformance_backends.files import FileBackend
from conformance_backends.memory import MemoryBackend
from lmcache_core.errors import BackendClosed, BackendError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import BackendStats, Call, Capabilities, Host, Item, Outcome, Status

# -- waits, stats and owners -----------------------------------------------------------------------


@breaks("stats_are_told_while_a_put_stalls")
class CountsUnderTheLockOfItsWrites(FileBackend):
    def stats(self) -> BackendStats:
        with self.lock:
            return super().stats()


@breaks("stats_are_told_at_any_time")
class NeedsOpenBeforeStats(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        self.host = host
        return super().open(host)

    def stats(self) -> BackendStats:
        return replace(super().stats(), capacity_bytes=self.host.capacity_bytes)


@breaks("stats_are_told_at_any_time")
class RefusesStatsAfterClose(MemoryBackend):
    closed = False

    def close(self) -> None:
        super().close()
        self.closed = True

    def stats(self) -> BackendStats:
        if self.closed:
            raise BackendClosed("closed")
        return super().stats()


@breaks("stats_are_told_at_any_time", also=RACES)
class RefusesStatsWhileItIsBusy(MemoryBackend):
    busy = 0

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        self.busy += 1
        super().put_many(items, call)
        self.busy -= 1

    def stats(self) -> BackendStats:
        if self.busy > 0:
            raise BackendError("busy")
        return super().stats()


@breaks("a_store_that_is_not_shared_has_one_owner_or_one_bound")
class SharesItsDirectoryUnawares(FileBackend):
    def take(self) -> None:
        return


# -- short and failed calls ----------------------------------------------------------------------


@breaks("a_call_that_moves_less_than_asked_cuts_no_value")
class TakesAWriteForAllOfIt(FileBackend):
    def write(self, path: Path, value: bytes) -> None:
        if self.medium.fault == "full":
            super().write(path, value)
        self.medium.change()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, value)
        os.close(descriptor)


@breaks("a_call_that_moves_less_than_asked_cuts_no_value")
class TakesAReadForAllOfIt(FileBackend):
    def read(self, key: StorageKey) -> bytes | None:
        self.medium.use()
        try:
            descriptor = os.open(self.path / key, os.O_RDONLY)
        except FileNotFoundError:
            return super().read(key)
        try:
            nbytes = os.fstat(descriptor).st_size
            return os.read(descriptor, nbytes).ljust(nbytes, b"\0")
        finally:
            os.close(descriptor)


@breaks("a_read_that_fails_is_a_failure_and_never_a_miss")
class CallsAReadErrorAMiss(FileBackend):
    def read(self, key: StorageKey) -> bytes | None:
        try:
            return super().read(key)
        except OSError:
            return None


@breaks("a_read_that_fails_is_a_failure_and_never_a_miss", also=RACES)
class LooksForItsFilesWithExists(FileBackend):
    """Which says no for whatever goes wrong."""

    def read(self, key: StorageKey) -> bytes | None:
        if os.path.exists(self.path / key):
            return super().read(key)
        with self.names:
            self.lengths.pop(key, None)
        return None


@breaks("a_put_that_fails_is_not_told_as_done")
class OnlyLogsAWriteError(FileBackend):
    def put_one(self, item: Item) -> Outcome:
        try:
            return super().put_one(item)
        except OSError as error:
            if error.errno in (errno.EROFS, errno.ENOSPC):
                raise
            return Outcome(status=Status.OK, nbytes=item.nbytes)


@breaks("a_delete_that_fails_is_not_told_as_done")
class CallsAFailedDeleteDone(FileBackend):
    def delete_one(self, key: StorageKey) -> Outcome:
        try:
            return super().delete_one(key)
        except OSError as error:
            if error.errno == errno.EROFS:
                raise
            return Outcome(status=Status.OK)


@breaks("a_delete_that_fails_is_not_told_as_done")
class ForgetsWhatItCouldNotDelete(FileBackend):
    """Gone as this process sees it, until the store is opened again."""

    def remove(self, key: StorageKey) -> None:
        try:
            super().remove(key)
        except OSError as error:
            if error.errno == errno.EROFS:
                raise

    def read(self, key: StorageKey) -> bytes | None:
        return super().read(key) if key in self.lengths else None
