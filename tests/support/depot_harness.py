"""Every hook of the conformance suite, for the backend of docs/how-to/publish-a-backend.md and its server."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from depot_process import Server
from depot_server import MISS, REPLY, REQUEST
from lmcache_core_depot.backend import DepotBackend

from lmcache_core.identity.keys import StorageKey
from lmcache_core_conformance import Fault, Harness


class BareSocket:
    """One blocking connection: a request, the value, a reply, and nothing else."""

    description = "one blocking socket"

    def __init__(self, server: Server, space: str) -> None:
        self._space = space
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, name: str, value: memoryview) -> None:
        self._ask(b"p", name, len(value))
        self._socket.sendall(value)
        self._receive(memoryview(bytearray(REPLY.size)))

    def get(self, name: str, target: memoryview) -> None:
        self._ask(b"g", name, len(target))
        self._receive(memoryview(bytearray(REPLY.size)))
        self._receive(target)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, what: bytes, name: str, nbytes: int) -> None:
        self._socket.sendall(REQUEST.pack(what, f"{self._space}/{name}".encode(), 0, nbytes, 0))

    def _receive(self, target: memoryview) -> None:
        count = self._socket.recv_into(target, 0, socket.MSG_WAITALL)
        if count < len(target):
            raise ConnectionError("the server closed the connection")


class DepotHarness(Harness):
    """One server for all stores, each in a space of its own."""

    backend = DepotBackend

    def __init__(self) -> None:
        self._server = Server()

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        if not self._server.port:
            self._server.start()
            atexit.register(self._server.kill)
        return {"host": "127.0.0.1", "port": self._server.port, "space": _space(tmp)}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        with socket.create_server(("127.0.0.1", 0)) as closed_below:
            port = closed_below.getsockname()[1]
        return {"host": "127.0.0.1", "port": port, "space": _space(tmp)}

    def medium_objects(self, tmp: Path) -> int:
        return self._server.ask(b"s", f"{_space(tmp)}/")[2]

    def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
        status, _, _, value = self._server.ask(b"g", f"{_space(tmp)}/{key}", nbytes=1 << 40)
        return None if status == MISS else value

    def raw_put(self, tmp: Path, key: StorageKey, value: bytes) -> None:
        self._server.ask(b"p", f"{_space(tmp)}/{key}", value)

    def raw_delete(self, tmp: Path, key: StorageKey) -> None:
        self._server.ask(b"d", f"{_space(tmp)}/{key}")

    def litter(self, tmp: Path) -> None:
        self._server.ask(b"p", f"{_space(tmp)}/Foreign key", b"not a value of this backend")

    def num_requests(self, tmp: Path) -> int:
        return self._server.ask(b"n", "")[1]

    def raw_driver(self, tmp: Path) -> BareSocket:
        return BareSocket(self._server, _space(tmp))

    @contextmanager
    def faulty(self, tmp: Path, fault: Fault) -> Iterator[None]:
        if fault is Fault.KILLED:
            self._server.kill()
            try:
                yield
            finally:
                self._server.start()
            return
        self._server.ask(b"x", fault.value)
        try:
            yield
        finally:
            self._server.ask(b"x", "")


def _space(tmp: Path) -> str:
    return str(tmp).replace("/", ".")[-100:]
