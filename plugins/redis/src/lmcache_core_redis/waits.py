"""Sending and receiving on a socket, each wait bounded by what remains of a call.

On a plain socket the kernel itself waits (`SO_RCVTIMEO`, `SO_SNDTIMEO`), so that megabytes take one system
call; its time-out bounds the whole of it. Under TLS, Python waits for each record.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
from collections.abc import Sequence

from lmcache_core.sdk import BackendUnavailable, Call

_TIMEVAL = struct.Struct("@ll")
_SLACK_S = 0.005
"""How much longer than the call a wait may be bounded by what was set for the wait before."""
_TLS_SLICE_NBYTES = 1 << 18
_TLS_WAIT_S = 0.5
"""How long a wait for a record lasts, whatever trickles in, before it is asked whether it is still wanted."""
_UNIX_SLICE_NBYTES = 1 << 16
"""A unix socket's time-out starts anew with each buffer of the kernel's; so much fits into one."""


class BoundedSocket:
    """A connected socket. `call` is to be set before it is used."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._slice_nbytes = _UNIX_SLICE_NBYTES if sock.family == socket.AF_UNIX else sys.maxsize
        self._bounds: dict[int, float] = {}
        self.call: Call | None = None
        if not self._tls:
            sock.settimeout(None)

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Sends all of `buffers`.

        Raises:
            DeadlineExceeded: the call's deadline came first.
            OSError: the connection broke.
        """
        for position, buffer in enumerate(buffers):
            memory, sent = memoryview(buffer), 0
            more = socket.MSG_MORE if position + 1 < len(buffers) else 0
            while sent < len(memory):
                if self._tls:
                    self._sock.settimeout(self._remaining())
                    sent += self._sock.send(memory[sent : sent + _TLS_SLICE_NBYTES])
                else:
                    self._bound(socket.SO_SNDTIMEO)
                    try:
                        sent += self._sock.send(memory[sent : sent + self._slice_nbytes], more)
                    except BlockingIOError:
                        self._remaining()

    def receive_some(self, memory: memoryview) -> int:
        """Receives at least one byte, and no more than have come."""
        while True:
            if self._tls:
                self._sock.settimeout(min(self._remaining(), _TLS_WAIT_S))
            else:
                self._bound(socket.SO_RCVTIMEO)
            try:
                count = self._sock.recv_into(memory)
            except (BlockingIOError, TimeoutError):
                continue  # to `remaining`, which raises once the call is late or cancelled
            if count == 0:
                raise BackendUnavailable("the server closed the connection")
            return count

    def fill(self, memory: memoryview) -> None:
        """Receives all of `memory`. Raises as `send` does, and BackendUnavailable at the stream's end."""
        received = 0
        while self._tls and received < len(memory):
            received += self.receive_some(memory[received:])
        while received < len(memory):
            self._bound(socket.SO_RCVTIMEO)
            try:
                count = self._sock.recv_into(memory[received:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if count == 0:
                raise BackendUnavailable(f"the server closed after {received} of {len(memory)} bytes")
            received += count

    @property
    def stirs(self) -> bool:
        """Whether an idle connection isn't quiet and open, as one is that owes no reply."""
        try:
            if self._tls:
                self._sock.settimeout(0)
                self._sock.recv(1)
            else:
                self._sock.recv(1, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        return True

    def _remaining(self) -> float:
        assert self.call is not None
        return self.call.remaining()

    def _bound(self, option: int) -> None:
        left = self._remaining()
        if left <= self._bounds.get(option, 0.0) <= left + _SLACK_S:
            return
        seconds = int(left)
        value = _TIMEVAL.pack(seconds, max(int((left - seconds) * 1e6), 1))  # nothing at all means for ever
        self._sock.setsockopt(socket.SOL_SOCKET, option, value)
        self._bounds[option] = left
