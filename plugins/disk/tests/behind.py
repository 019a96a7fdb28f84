"""What stands behind the disk backend in its conformance tests: its files, and a faulty system under it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.sdk import StorageKey
from lmcache_core_conformance.behind import Fault
from lmcache_core_disk.files import Files
from lmcache_core_disk.journal import replay

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FaultyFiles(Files):
    """System calls on a file system that may stall, fill up or become read-only for a while.

    Access rules can't be taken from a root user, and disks don't stall on demand: so both happen here,
    at the seam, in every call that the real fault would reach.
    """

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._changed = threading.Condition()  # guards the fault

    @contextmanager
    def faulty(self, fault: Fault) -> Iterator[None]:
        self._set(fault)
        try:
            yield
        finally:
            self._set(None)

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if flags & _WRITING:
            self._change()
        if flags & os.O_CREAT:
            self._grow()
        return super().open(name, flags, dir_fd)

    def mkdir(self, name: str, dir_fd: int) -> None:
        self._change()
        self._grow()
        super().mkdir(name, dir_fd)

    def rename(self, source: str, target: str, source_fd: int, target_fd: int) -> None:
        self._change()
        super().rename(source, target, source_fd, target_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._change()
        super().unlink(name, dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._stall()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._stall()
        self._change()
        self._grow()
        return super().pwritev(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._change()
        super().truncate(fd, nbytes)

    def _set(self, fault: Fault | None) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def _stall(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not Fault.STALLED)

    def _change(self) -> None:
        if self._fault is Fault.READ_ONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def _grow(self) -> None:
        if self._fault is Fault.FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def slot_file(cache: Path, key: StorageKey) -> Path | None:
    """The file of a stored value, as the shards' journals say."""
    for shard in sorted(cache.glob("shard-*")):
        value = replay((shard / "journal").read_bytes()).values.get(key)
        if value is not None:
            return shard / "slots" / f"{value.slot // 256:06x}" / f"{value.slot % 256:02x}"
    return None
