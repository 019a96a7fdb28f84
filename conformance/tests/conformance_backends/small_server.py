"""A server of a few lines, and a client that keeps its connection, for the tests of the network."""

from __future__ import annotations

import contextlib
import socket
import sys

from lmcache_core_conformance.network import ServerProcess

NBYTES = 64 << 10
ENOUGH_S, SILENT_S = 60.0, 0.5
SERVER = """
import socketserver, sys

class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            what, nbytes = line.split()
            if what == b"put":
                self.rfile.read(int(nbytes))
            self.wfile.write(b"v" * int(nbytes) if what == b"get" else b"k")

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", *sys.argv[2:], flush=True)
server.serve_forever()
"""


class Client:
    """One connection, made when it is first needed and after a failure, as a driver keeps it."""

    def __init__(self, port: int) -> None:
        self.timeout_s = ENOUGH_S
        self._port = port
        self._socket: socket.socket | None = None

    def get(self) -> int:
        """How many bytes came. Raises what stopped them."""
        return self._ask(b"get %d\n" % NBYTES, NBYTES)

    def put(self) -> int:
        return self._ask(b"put %d\n" % NBYTES + b"v" * NBYTES, 1)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, request: bytes, due: int) -> int:
        received = 0
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), ENOUGH_S)
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(request)
            while received < due:
                piece = self._socket.recv(due - received)
                if not piece:
                    raise EOFError(f"after {received} bytes")
                received += len(piece)
        except (OSError, EOFError):
            self.close()
            raise
        return received


def get_once(port: int, timeout_s: float = ENOUGH_S) -> int:
    with contextlib.closing(Client(port)) as client:
        client.timeout_s = timeout_s
        return client.get()


def serving(port: int, ready: str | int = "serving") -> ServerProcess:
    command = [sys.executable, "-I", "-c", SERVER, str(port)]
    return ServerProcess(command, ready=ready, ready_within_s=ENOUGH_S)
