"""A server of a few lines that answers what it is told to, however wrong; unlike a real one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Answer = Callable[[list[bytes]], bytes]
"""What is answered to a command, as it goes over the wire."""


_ASKED_ABOUT = (b"HGET", b"HLEN", b"HMGET", b"CLUSTER", b"SENTINEL")


class Liar:
    """Opens a tier properly; `answer` is asked about reads and routes from then on that it is set."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.pause_s = 0.0  # after each byte
        self._closed = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, client.makefile("rb") as received:
            while (line := received.readline()) and not self._closed.is_set():
                command = []
                for _ in range(int(line[1:])):
                    nbytes = int(received.readline()[1:])
                    command.append(received.read(nbytes))
                    received.read(2)
                reply = self._reply(command)
                if not self.pause_s:
                    client.sendall(reply)
                    continue
                for byte in reply:
                    client.sendall(bytes([byte]))
                    self._closed.wait(self.pause_s)

    def _reply(self, command: list[bytes]) -> bytes:
        if self.answer is not None and command[0] in _ASKED_ABOUT:
            return self.answer(command)
        if command[0] == b"PING":
            return bulk(command[1])
        return {
            b"HGET": b"$-1\r\n",
            b"HMGET": b"*2\r\n$-1\r\n$-1\r\n",
            b"MULTI": b"+OK\r\n",
            b"EXEC": b"*1\r\n:1\r\n",
            b"SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
        }.get(command[0], b":1\r\n")


def bulk(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)
