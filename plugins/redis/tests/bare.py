"""The bare driver: sockets and commands in place, and nothing else. What the backend is compared with."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence

PIECE_NBYTES = (4 << 20) - 4096
AHEAD = 2


class BareConnection:
    """One blocking connection that sends commands with large arguments and receives into place."""

    def __init__(
        self, port: int, username: str = "", password: str = "", context: ssl.SSLContext | None = None
    ) -> None:
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain
        self._received = bytearray()
        self._wait_flag = 0 if context else socket.MSG_WAITALL  # TLS comes record by record
        if password:
            self.send(b"AUTH", username.encode(), password.encode())
            self.expect_line(b"+")

    def send(self, *arguments: bytes | memoryview) -> None:
        """One command. Large arguments go out as they lie in memory."""
        small = [b"*%d\r\n" % len(arguments)]
        for argument in arguments:
            small.append(b"$%d\r\n" % len(argument))
            if len(argument) < 4096:
                small += [bytes(argument), b"\r\n"]
                continue
            self._socket.sendall(b"".join(small))
            self._socket.sendall(argument)
            small = [b"\r\n"]
        self._socket.sendall(b"".join(small))

    def expect_line(self, start: bytes) -> bytes:
        """The rest of a reply's line, which begins with `start`."""
        while (end := self._received.find(b"\r\n")) < 0:
            content = self._socket.recv(64)
            if not content:
                raise ConnectionError("the server closed the connection")
            self._received += content
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        if not line.startswith(start):
            raise ConnectionError(f"a reply {line[:100]!r} instead of {start!r}")
        return line[len(start) :]

    def receive(self, target: memoryview) -> None:
        """A bulk reply as long as `target`, into it."""
        nbytes = int(self.expect_line(b"$"))
        if nbytes != len(target):
            raise ConnectionError(f"a value of {nbytes} bytes instead of {len(target)}")
        early = min(len(self._received), nbytes)
        target[:early] = self._received[:early]
        del self._received[:early]
        while early < nbytes:
            count = self._socket.recv_into(target[early:], 0, self._wait_flag)
            if not count:
                raise ConnectionError("the server closed the connection")
            early += count
        while len(self._received) < 2:
            self._received += self._socket.recv(2 - len(self._received))
        del self._received[:2]

    def close(self) -> None:
        self._socket.close()


class BareDriver:
    """A hash of pieces a value: written whole in a transaction, read piece by piece, two on their way."""

    def __init__(
        self,
        connections: Sequence[BareConnection],
        node_of: Callable[[str], int],
        space: str,
        piece_nbytes: int = PIECE_NBYTES,
    ) -> None:
        self._connections = connections
        self._node_of = node_of
        self._space = space
        self._piece_nbytes = piece_nbytes

    @property
    def description(self) -> str:
        return "a bare socket: MULTI, an HSET a piece, EXEC; an HGET a piece, two on their way"

    def put(self, name: str, value: memoryview) -> None:
        key, connection = self._find(name)
        pieces = cut(value, self._piece_nbytes)
        connection.send(b"MULTI")
        connection.send(b"UNLINK", key)
        for number, piece in enumerate(pieces):
            connection.send(b"HSET", key, b"%d" % number, piece)
        connection.send(b"EXEC")
        connection.expect_line(b"+OK")
        for _ in range(len(pieces) + 1):
            connection.expect_line(b"+QUEUED")
        connection.expect_line(b"*")
        for _ in range(len(pieces) + 1):
            connection.expect_line(b":")

    def put_aside(self, name: str, value: memoryview) -> None:
        """The other way to write a value whole: under another name, which then becomes its own."""
        key, connection = self._find(name)
        aside, pieces = key + b"aside", cut(value, self._piece_nbytes)
        for number, piece in enumerate(pieces):
            connection.send(b"HSET", aside, b"%d" % number, piece)
        connection.send(b"UNLINK", key)  # RENAME would free a large value on the server's only thread
        connection.send(b"RENAME", aside, key)
        for _ in range(len(pieces) + 1):
            connection.expect_line(b":")
        connection.expect_line(b"+OK")

    def get(self, name: str, target: memoryview) -> None:
        key, connection = self._find(name)
        pieces = cut(target, self._piece_nbytes)
        for number in range(min(AHEAD, len(pieces))):
            connection.send(b"HGET", key, b"%d" % number)
        for number, piece in enumerate(pieces, AHEAD):
            connection.receive(piece)
            if number < len(pieces):
                connection.send(b"HGET", key, b"%d" % number)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _find(self, name: str) -> tuple[bytes, BareConnection]:
        key = f"{self._space}:{{bare-{name}}}"
        return key.encode(), self._connections[self._node_of(key)]


def cut(value: memoryview, piece_nbytes: int = PIECE_NBYTES) -> list[memoryview]:
    return [value[start : start + piece_nbytes] for start in range(0, len(value), piece_nbytes)]
