"""What every backend's author would write again: filling views from sockets, reading, cutting, copying."""

from __future__ import annotations

import io
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import BackendUnavailable, DeadlineExceeded
from lmcache_core.storage.contract import Call, View

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


def recv_into(sock: socket.socket, target: View | memoryview, call: Call) -> None:
    """Fills `target` from `sock`, each wait bounded by what remains of the call. Blocks.

    The socket's time-out is left changed. After an error the connection is in the middle of a message:
    close it.

    Raises:
        DeadlineExceeded: the call's deadline came first, however slowly bytes trickled in.
        BackendUnavailable: the peer closed the connection.
    """
    memory = host_memory(target) if isinstance(target, View) else target
    received = 0
    while received < len(memory):
        sock.settimeout(call.remaining())
        try:
            count = sock.recv_into(memory[received:])
        except TimeoutError:
            raise DeadlineExceeded(f"{received} of {len(memory)} bytes came in time") from None
        if count == 0:
            raise BackendUnavailable(f"the peer closed after {received} of {len(memory)} bytes")
        received += count


def host_memory(view: View) -> memoryview:
    """The view's bytes.

    Raises:
        ValueError: it isn't in host memory.
    """
    memory = view.host
    if memory is None:
        raise ValueError(f"{view!r} is not in host memory")
    return memory


def cut(views: Sequence[View], offset: int, nbytes: int) -> list[View]:
    """The views of bytes `[offset, offset + nbytes)` of the value that `views` make up.

    Raises:
        ValueError: the range does not lie inside them.
    """
    if offset < 0 or nbytes < 0 or offset + nbytes > sum(view.nbytes for view in views):
        raise ValueError(f"[{offset}, {offset + nbytes}) is not inside {sum(v.nbytes for v in views)} bytes")
    pieces = []
    for view in views:
        if nbytes == 0:
            break
        if offset >= view.nbytes:
            offset -= view.nbytes
            continue
        count = min(nbytes, view.nbytes - offset)
        pieces.append(view.slice(offset, count))
        offset, nbytes = 0, nbytes - count
    return pieces


class ViewReader(io.RawIOBase):
    """A read-only file over views in host memory, for drivers that upload from file objects.

    Close it (or use it as a context manager) before the item is settled: it then lets go of the views.
    """

    def __init__(self, views: Sequence[View]) -> None:
        super().__init__()
        self._pieces = [host_memory(view) for view in views]
        self._nbytes = sum(len(piece) for piece in self._pieces)
        self._position = 0

    def __len__(self) -> int:
        return self._nbytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"can't seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self.closed:
            raise ValueError("read from a closed ViewReader")
        target = memoryview(buffer).cast("B")
        filled, start = 0, 0
        for piece in self._pieces:
            first = self._position - start
            if first < len(piece) and filled < len(target):
                count = min(len(target) - filled, len(piece) - first)
                target[filled : filled + count] = piece[first : first + count]
                filled += count
                self._position += count
            start += len(piece)
        return filled

    def close(self) -> None:
        self._pieces = []
        super().close()


def copy(dst_address: int, src_address: int, nbytes: int) -> None:
    """Copies memory without holding the GIL. The caller answers for both addresses."""
    import ctypes

    ctypes.memmove(dst_address, src_address, nbytes)
