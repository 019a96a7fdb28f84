"""The address of a memoryview, and the promise that its memory stays while it is used."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from types import TracebackType
from typing import Self

# `Py_buffer` of the stable ABI: buf, obj, len, itemsize, readonly and ndim, and five pointers.
_PyBuffer = ctypes.c_uint64 * 10
_WRITABLE = 1


class Buffer:
    """A context in which `address` and `nbytes` are those of `memory`, which may be read-only.

    Raises:
        BufferError: on entry, it is not contiguous, or read-only where `writable` was asked for.
    """

    __slots__ = ("_buffer", "_flags", "_memory", "address", "nbytes")

    def __init__(self, memory: memoryview, *, writable: bool) -> None:
        self._memory = memory
        self._flags = _WRITABLE if writable else 0

    def __enter__(self) -> Self:
        self._buffer = buffer = _PyBuffer()
        _python().PyObject_GetBuffer(self._memory, buffer, self._flags)
        self.address, self.nbytes = buffer[0], buffer[2]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _python().PyBuffer_Release(self._buffer)


@lru_cache(maxsize=1)
def _python() -> ctypes.PyDLL:
    """Python's own functions, declared: its calls keep the GIL and raise what they raise."""
    python = ctypes.PyDLL(None)
    python.PyObject_GetBuffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    python.PyBuffer_Release.argtypes = [ctypes.c_void_p]
    python.PyBuffer_Release.restype = None
    return python
