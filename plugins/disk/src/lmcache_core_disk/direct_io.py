"""Aligned transfers between files and the caller's memory: no byte passes through a buffer of ours."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence

from lmcache_core_disk.files import Files

log = logging.getLogger(__name__)

PAGE = 4096
IOV_MAX = 1024
"""The most buffers that Linux takes in one `preadv` or `pwritev`."""

REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})
"""How file systems say that they do no direct I/O, or not at this alignment."""

_PROBE = "probe"


class DirectIO:
    """Reads and writes whole spans with O_DIRECT, or through the page cache once that was refused.

    Thread-safe. Every buffer's address and length and every offset is a multiple of 4096.
    """

    def __init__(self, files: Files, *, direct: bool, where: str) -> None:
        self.files = files
        self._where = where
        self._direct = direct
        self._lock = threading.Lock()  # guards _direct: it only ever turns False, with one warning

    @property
    def direct(self) -> bool:
        return self._direct

    def probe(self, dir_fd: int) -> None:
        """Proves that a page can be written and read back in this directory; may degrade.

        Raises:
            OSError: it can't be, with or without direct I/O.
        """
        with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            memory = memoryview(page)
            try:
                memory[:8] = b"lmcache?"
                self.write(_PROBE, dir_fd, [memory], create=True)
                memory[:8] = bytes(8)
                fd = self.open(_PROBE, dir_fd)
                try:
                    nbytes = self.read(fd, [memory], 0)
                finally:
                    self.files.close(fd)
                if nbytes != PAGE or bytes(memory[:8]) != b"lmcache?":
                    raise OSError(errno.EIO, "a page did not read back as it was written")
            finally:
                memory.release()
                with contextlib.suppress(FileNotFoundError):
                    self.files.unlink(_PROBE, dir_fd)

    # A file is opened for one transfer, and closed by the thread that opened it: a descriptor that
    # nobody shares can't be closed under a reader. Opening costs microseconds, a frame milliseconds.

    def open(self, name: str, dir_fd: int, flags: int = os.O_RDONLY) -> int:
        """A descriptor for one transfer; the caller closes it."""
        if self._direct:
            try:
                return self.files.open(name, flags | os.O_DIRECT, dir_fd)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                refusal = error.errno
            fd = self.files.open(name, flags, dir_fd)  # raises the same if it was the request's fault
            self._degrade(refusal)
            return fd
        return self.files.open(name, flags, dir_fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills `buffers` from `offset` on; returns the bytes read, fewer only at the file's end."""
        return self._transfer(self.files.preadv, fd, buffers, offset)

    def write(self, name: str, dir_fd: int, buffers: Sequence[memoryview], *, create: bool) -> int:
        """Writes `buffers` from the file's start on; returns the bytes that the file then occupies.

        After an OSError the file's contents are unspecified.
        """
        fd = self.open(name, dir_fd, os.O_WRONLY | (os.O_CREAT | os.O_TRUNC if create else 0))
        try:
            wanted = sum(len(buffer) for buffer in buffers)
            if self._transfer(self.files.pwritev, fd, buffers, 0) < wanted:
                raise OSError(errno.EIO, "the file system wrote less than it was given")
            return self.files.fstat(fd).st_blocks * 512
        finally:
            self.files.close(fd)

    def _transfer(
        self,
        transfer: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        try:
            return move(transfer, fd, buffers, offset)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            refusal = error.errno
        self.files.set_buffered(fd)
        moved = move(transfer, fd, buffers, offset)  # raises the same if it was the request's fault
        self._degrade(refusal)
        return moved

    def _degrade(self, refusal: int) -> None:
        with self._lock:
            first, self._direct = self._direct, False
        if first:
            log.warning(
                "%s: the file system refuses direct I/O (%s); reading and writing through the page cache",
                self._where,
                errno.errorcode.get(refusal, str(refusal)),
            )


def move(
    transfer: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Repeats `transfer` until every buffer went through or it stops short of a page: the file's end."""
    rest = list(buffers)
    total = 0
    while rest:
        moved = transfer(fd, rest[:IOV_MAX], offset + total)
        total += moved
        if moved == 0 or moved % PAGE:
            break
        while rest and moved >= len(rest[0]):
            moved -= len(rest.pop(0))
        if moved:
            rest[0] = rest[0][moved:]
    return total
