"""The disk backend: values in slot files of this process's shard, moved by direct I/O."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmcache_core.sdk import (
    Backend,
    BackendClosed,
    BackendError,
    BackendStats,
    BackendUnavailable,
    ByteSize,
    Call,
    Capabilities,
    ConfigError,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Status,
    StorageKey,
    host_memory,
    status_for_errno,
)
from lmcache_core_disk.config import DiskConfig
from lmcache_core_disk.direct_io import PAGE
from lmcache_core_disk.files import Files
from lmcache_core_disk.journal import Value
from lmcache_core_disk.reading import MISS, Lost, Reading
from lmcache_core_disk.shard import LEAST_NBYTES, Directory, unusable
from lmcache_core_disk.store import Store, open_store

log = logging.getLogger(__name__)

_REMOVED = "its directory was removed; the next put makes it anew"


class DiskBackend(Backend[DiskConfig]):
    """Stores values under one directory, which several processes may share, each with its own shard.

    A put writes into a slot that no value names and then appends a journal record, which is the moment
    it becomes visible; so it is whole or absent through a kill at any point. The capacity bounds every
    byte in the directory at every moment. System errors are outcomes.
    """

    config_class = DiskConfig

    def __init__(self, config: DiskConfig, *, files: Files | None = None) -> None:
        self._config = config
        self._files = files if files is not None else Files()
        self._host: Host | None = None
        self._pid = 0
        self._opening = threading.Lock()  # held by who opens the store anew
        self._lock = threading.Lock()  # guards what follows; nothing else is done under it
        self._store: Store | None = None
        self._leaving: Store | None = None  # removed under us; the last call that may use it closes it
        self._calls = 0
        self._closed = False
        self._counters: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            medium="file",
            delete=True,
            scan=True,
            ranged=True,
            range_min=PAGE,
            persistent=True,
            max_in_flight=self._config.max_in_flight,
        )

    def open(self, host: Host) -> None:
        store = self._open_store(host)
        with self._lock:
            if not self._closed:
                self._host, self._store, self._pid = host, store, os.getpid()
                return
        store.close()
        raise BackendClosed("closed while it opened", backend=host.tier, op="open")

    def _open_again(self, host: Host, call: Call) -> None:
        """Makes the directory anew after somebody removed it, and empty: the core knows of nothing there.

        Raises:
            BackendUnavailable: calls still use the old one, or another thread is at it.
            LMCacheError: as `open`.
        """
        with self._lock:
            leaving = self._leaving is not None
        if leaving or not self._opening.acquire(blocking=False):
            raise BackendUnavailable(_REMOVED, op="put")
        try:
            if self._store is None:
                self.open(host)
                with self._running("put") as store:
                    for value in store.catalog.snapshot():
                        store.catalog.remove(value.key, call)
                log.warning("%s: its directory was removed, and is made anew", store.directory.path)
        finally:
            self._opening.release()

    def _open_store(self, host: Host) -> Store:
        path, processes = self._config.path.expanduser().absolute(), self._config.processes
        capacity = host.capacity_bytes
        if capacity is None:
            raise ConfigError(
                f"tier {host.tier}: set `capacity`; the disk backend keeps to it, whatever comes"
            )
        if capacity // processes < LEAST_NBYTES:
            shared = f" for {processes} processes" if processes > 1 else ""
            raise ConfigError(
                f"tier {host.tier}: a capacity of {ByteSize(capacity)} is too little{shared}; set at least "
                f"{ByteSize(processes * LEAST_NBYTES)}"
            )
        directory = Directory(self._files, path, capacity_nbytes=capacity, processes=processes)
        try:
            return open_store(
                self._files,
                directory,
                parts=host.parts,
                direct_io=self._config.direct_io,
                timeout_s=host.deadline_s,
            )
        except BackendUnavailable as error:
            error.backend, error.op = host.tier, "open"
            raise
        except OSError as error:
            raise unusable(path, error) from error.with_traceback(None)

    def close(self) -> None:
        """Refuses new calls; files close, and the shard is free, when the last running call ends."""
        with self._lock:
            self._closed = True
            store = self._store
            idle = self._calls == 0
            if idle:
                self._store = None
        if store is not None:
            store.catalog.close()
            if idle:
                _close_quietly(store)

    # -- the operations --------------------------------------------------------------------------

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        if self._store is None and self._host is not None and not self._closed and os.getpid() == self._pid:
            self._open_again(self._host, call)
        with self._running("put") as store:
            for index, item in enumerate(items):
                call.done(index, self._put(store, item, call))

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        with self._running("get") as store:
            ahead = Reading(store, items[0]) if items else None
            try:
                for index, item in enumerate(items):
                    call.remaining()
                    assert ahead is not None
                    reading, ahead = ahead, None
                    try:
                        outcome = self._get(store, item, reading, call)
                    finally:
                        reading.close()
                    if index + 1 < len(items):
                        ahead = Reading(store, items[index + 1])
                    call.done(index, outcome)
            finally:
                if ahead is not None:
                    ahead.close()

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        with self._running("stat") as store:
            call.remaining()
            for index, key in enumerate(keys):
                value = store.catalog.find(key)
                call.done(index, MISS if value is None else _described(value))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        with self._running("delete") as store:
            for index, key in enumerate(keys):
                call.done(index, self._delete(store, key, call))
            store.relax()

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        """Oldest first; the cursor is the last token, so a value stored anew meanwhile comes again."""
        call.remaining()
        with self._running("scan") as store:
            values, more = store.catalog.page(prefix, int(cursor or 0), limit)
        entries = [
            Entry(
                key=value.key,
                nbytes=value.nbytes,
                stored=value.charged,
                parent=value.parent,
                token=value.token,
            )
            for value in values
        ]
        return Page(entries=entries, cursor=str(entries[-1].token) if more else None)

    def stats(self) -> BackendStats:
        """`used_bytes` counts live and free slots, journal and directories, and never exceeds capacity."""
        with self._lock:
            store, counters = self._store, dict(self._counters)
        if store is None:
            return BackendStats(counters=counters)
        counters |= store.slots.counters()
        counters["direct_io"] = int(store.io.direct)
        counters["compactions"] = store.journal.compactions
        return BackendStats(
            entries=len(store.catalog),
            used_bytes=store.slots.used_nbytes,
            capacity_bytes=store.slots.limit,
            counters=counters,
        )

    # -- one item --------------------------------------------------------------------------------

    def _put(self, store: Store, item: Item, call: Call) -> Outcome:
        call.remaining()
        if item.nbytes == 0 or item.nbytes % PAGE:
            return self._refused("put", item, f"{item.nbytes} bytes are not whole pages of {PAGE}")
        try:
            slot = store.slots.write(item.nbytes, [host_memory(view) for view in item.views])
            value = store.catalog.commit(item.key, item.parent, slot, call) if slot is not None else None
        except OSError as error:
            if error.errno == errno.ENOENT and store.shard.is_gone():
                self._leave(store)
            return self._outcome(error, "put", item.key)
        if value is None:
            self._count("full")
            return Outcome(status=Status.FULL)
        self._count("puts")
        return _described(value)

    def _get(self, store: Store, item: Item, reading: Reading, call: Call) -> Outcome:
        if item.offset % PAGE or item.nbytes % PAGE:
            return self._refused("get", item, f"a range must be whole pages of {PAGE}")
        try:
            outcome = reading.run()
        except Lost as lost:
            self._lose(store, lost, call)
            return MISS
        except OSError as error:
            return self._outcome(error, "get", item.key)
        if outcome.status is Status.OK:
            self._count("gets")
        return outcome

    def _delete(self, store: Store, key: StorageKey, call: Call) -> Outcome:
        call.remaining()
        try:
            value = store.catalog.remove(key, call)
        except OSError as error:
            return self._outcome(error, "delete", key)
        return MISS if value is None else _described(value)

    def _lose(self, store: Store, lost: Lost, call: Call) -> None:
        """Drops a value that can't be read any more, and tells the core."""
        self._count("lost")
        value = lost.value
        log.warning("%s: %s", store.directory.path, lost)
        try:
            store.catalog.remove(value.key, call, only=value)
        except OSError as error:
            log.warning("%s: %s could not be dropped: %s", store.directory.path, value.key, error)
        if self._host is not None:
            self._host.lost([(value.key, value.token)], lost.reason)

    def _leave(self, store: Store) -> None:
        """Gives up a store whose directory somebody removed; the next put makes it anew."""
        with self._lock:
            first = self._store is store
            if first:
                self._store, self._leaving = None, store
        if first and self._host is not None:
            self._host.lost_all(f"{store.directory.path} was removed")

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _running(self, op: str) -> Iterator[Store]:
        """The open store, kept open until the block ends."""
        store, closed = None, True
        if os.getpid() == self._pid:  # a forked child owns no shard, and must not touch its parent's
            with self._lock:
                closed = self._closed
                if not closed and self._store is not None:
                    store = self._store
                    self._calls += 1
        if store is None:
            if closed:
                raise BackendClosed("the backend is not open", op=op)
            raise BackendUnavailable(_REMOVED, op=op)
        try:
            yield store
        finally:
            leaving: list[Store] = []
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    if self._leaving is not None:
                        leaving.append(self._leaving)
                        self._leaving = None
                    if self._closed and self._store is not None:
                        leaving.append(self._store)
                        self._store = None
            for each in leaving:
                _close_quietly(each)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1

    def _outcome(self, error: OSError, op: str, key: StorageKey) -> Outcome:
        self._count("full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "failed")
        return status_for_errno(error.errno, error.strerror or str(error), op=op)

    def _refused(self, op: str, item: Item, reason: str) -> Outcome:
        self._count("failed")
        return Outcome(status=Status.FAILED, error=BackendError(reason, op=op, key=item.key))


def _described(value: Value) -> Outcome:
    return Outcome(status=Status.OK, nbytes=value.nbytes, stored=value.charged, token=value.token)


def _close_quietly(store: Store) -> None:
    try:
        store.close()
    except OSError as error:
        log.warning("%s: %s while closing", store.directory.path, error)
