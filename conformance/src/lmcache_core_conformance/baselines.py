"""The bare media that the performance group compares with: a plain copy, a loop of direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Protocol

from lmcache_core_conformance.values import PAGE

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class RawDriver(Protocol):
    """The medium without the backend: the quickest plain loop over its driver. Used by one thread.

    Values are put first, a few under different names, and then overwritten and read many times.
    """

    @property
    def description(self) -> str:
        """What it is, for the report: `redis-py, one SET a value`."""

    def put(self, name: str, value: memoryview) -> None:
        """Stores `value`, replacing what is there."""

    def get(self, name: str, target: memoryview) -> None:
        """Reads the value, which is as long as `target`, into it."""

    def close(self) -> None:
        """Lets go of everything."""


class PlainCopy:
    """Memory to memory: one copy, into memory that lies ready."""

    description = "a plain copy"

    def __init__(self) -> None:
        self._values: dict[str, ctypes.Array[ctypes.c_char]] = {}

    def put(self, name: str, value: memoryview) -> None:
        kept = self._values.get(name)
        if kept is None:
            self._values[name] = kept = (ctypes.c_char * len(value))()
        ctypes.memmove(kept, _address(value), len(value))

    def get(self, name: str, target: memoryview) -> None:
        ctypes.memmove(_address(target), self._values[name], len(target))

    def close(self) -> None:
        self._values.clear()


class BareFiles:
    """A file a value, kept open, written in place and read by one call with direct I/O.

    Where the file system refuses direct I/O, through the page cache; `description` says which.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, int] = {}
        self._direct = _takes_direct_io(directory)

    @property
    def description(self) -> str:
        return "bare direct I/O" if self._direct else "bare buffered I/O (direct I/O is refused here)"

    def put(self, name: str, value: memoryview) -> None:
        if name not in self._files:
            self._files[name] = self._open(name)
        _whole(os.pwrite(self._files[name], value, 0), len(value))

    def get(self, name: str, target: memoryview) -> None:
        _whole(os.preadv(self._files[name], [target], 0), len(target))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        return os.open(self._directory / name, flags, 0o600)


def _takes_direct_io(directory: Path) -> bool:
    """Whether a page can be written with O_DIRECT: some file systems refuse only the write."""
    path = directory / "direct-io-probe"
    try:
        with mmap.mmap(-1, PAGE) as page, contextlib.ExitStack() as stack:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            stack.callback(os.close, descriptor)
            os.pwrite(descriptor, page, 0)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _whole(moved: int, nbytes: int) -> None:
    if moved != nbytes:
        raise OSError(errno.EIO, f"the baseline moved {moved} of {nbytes} bytes")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
