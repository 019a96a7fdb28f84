"""The depot server as a process: to start, to kill, and to ask."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from depot_server import REPLY, REQUEST

SERVER = Path(__file__).with_name("depot_server.py")


class Server:
    """A server in a process of its own. Killed and started again, it is empty and has the same port."""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.port)], stdout=subprocess.PIPE, text=True
        )
        with self._process.stdout as output:
            self.port = int(output.readline())

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(
        self, what: bytes, name: str, value: bytes = b"", nbytes: int = 0
    ) -> tuple[bytes, int, int, bytes]:
        """How it ended, the number in the reply, the values in that space, and the value."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(REQUEST.pack(what, name.encode(), 0, nbytes or len(value), 0) + value)
            with connection.makefile("rb") as answer:
                status, number, entries, _, _ = REPLY.unpack(answer.read(REPLY.size))
                return status, number, entries, answer.read(number if what == b"g" else 0)
