"""The one mapping that all frames lie in."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable

from lmcache_core.errors import ConfigError
from lmcache_core.kernels import pin

HUGE_PAGE = 2 << 20


class _Memory(mmap.mmap):
    """Memory that is unpinned before it goes, also where the last view of it ends it: `mmap` unmaps first."""

    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        self.end_pin()

    def end_pin(self) -> None:
        unpin, self.unpin = self.unpin, None
        if unpin is not None:
            unpin()


class Mapping:
    """`nbytes` of private anonymous memory, the first byte at a multiple of 2 MiB.

    Private, because Linux gives Python's default, a shared mapping, no huge pages. Untouched pages
    cost nothing, but where the process uses CUDA already: there all of them are pinned, so that copies to
    and from a GPU are asynchronous and quick. Lives until `close` or until nothing refers to it.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool) -> None:
        try:
            self.memory = _Memory(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
        self.memory.unpin = pin(self.address, nbytes)  # after the advice: pinning takes the pages

    def view(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self.memory)[self.start : self.start + self.nbytes]

    def close(self) -> None:
        """Gives the memory back now, or when the last view of it is gone. No frame may be in use."""
        self.memory.end_pin()
        with contextlib.suppress(BufferError):
            self.memory.close()
