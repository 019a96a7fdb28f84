"""The one mapping that all frames lie in."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from lmcache_core.errors import ConfigError

HUGE_PAGE = 2 << 20


class Mapping:
    """`nbytes` of private anonymous memory, the first byte at a multiple of 2 MiB.

    Private, because Linux gives Python's default, a shared mapping, no huge pages. Untouched pages
    cost nothing. Lives until `close` or until nothing refers to it.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool) -> None:
        try:
            self.memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{nbytes / (1 << 30):.1f} GiB of frame memory can't be mapped ({reason}): lower "
                "`memory.staging`, or the `capacity` of the tier that keeps frames in memory"
            ) from error
        first = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self.start = -first % HUGE_PAGE
        self.address = first + self.start
        self.nbytes = nbytes
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
                self.memory.madvise(mmap.MADV_HUGEPAGE)

    def view(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self.memory)[self.start : self.start + self.nbytes]

    def close(self) -> None:
        """Gives the memory back now, or when the last view of it is gone."""
        with contextlib.suppress(BufferError):
            self.memory.close()
