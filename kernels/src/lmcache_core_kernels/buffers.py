"""Addresses of memoryviews, many at once, and the promise that the memory stays while they are used."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from lmcache_core_kernels.abi import python_library

# `Py_buffer` of the stable ABI: buf, obj, len, itemsize, readonly and ndim, and five pointers.
_WORDS = 10
_WRITABLE = 1


class Buffers:
    """A context in which `addresses[i]` and `nbytes[i]` are those of `views[i]`.

    ctypes alone tells addresses of writable memory only, and costs a microsecond a view.

    Raises:
        BufferError: on entry, a view is not contiguous, or read-only where `writable` was asked for.
    """

    __slots__ = ("_memory", "_taken", "_views", "_writable", "addresses", "nbytes")

    def __init__(self, views: Sequence[memoryview], *, writable: bool) -> None:
        self._views = views
        self._writable = _WRITABLE if writable else 0
        self._taken = 0

    def __enter__(self) -> Self:
        library, get, _ = python_library()
        count = len(self._views)
        self._memory = memory = (ctypes.c_uint64 * (_WORDS * count))()
        objects, taken = array("Q", map(id, self._views)), ctypes.c_int64()
        try:
            address, _ = objects.buffer_info()
            library.lmck_take_buffers(get, address, memory, count, self._writable, ctypes.addressof(taken))
        finally:
            self._taken = taken.value
            if self._taken < count:
                self._give_back()
        self.addresses: list[int] = memory[0::_WORDS]
        self.nbytes: list[int] = memory[2::_WORDS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        library, _, release = python_library()
        count, self._taken = self._taken, 0
        library.lmck_release_buffers(release, self._memory, count)
