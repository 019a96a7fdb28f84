"""A correct backend over a TCP server that evicts by itself, in small methods that broken ones replace."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from conformance_backends.kv_server import REPLY, REQUEST
from lmcache_core.errors import (
    BackendClosed,
    BackendUnavailable,
    DeadlineExceeded,
    PermissionDenied,
)
from lmcache_core.identity.keys import KEY_PATTERN, StorageKey
from lmcache_core.sdk import Secret, host_memory, recv_into
from lmcache_core.storage.contract import (
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Status,
)

_STATUSES = {b"M": Status.MISS, b"F": Status.FULL, b"T": Status.TOO_SMALL}


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int
    password: Secret
    address: str = "127.0.0.1"


class _Opening:
    """A call's patience while there is no call yet."""

    deadline, cancelled = 0.0, False

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def remaining(self) -> float:
        return self.timeout_s

    def done(self, index: int, outcome: Outcome) -> None:
        raise AssertionError("opening settles nothing")


class NetworkBackend(Backend[NetworkConfig]):
    config_class = NetworkConfig

    def __init__(self, config: NetworkConfig) -> None:
        self.config = config
        self.pid = os.getpid()
        self.lock = threading.Lock()  # guards what follows
        self.idle: list[socket.socket] = []
        self.busy: set[socket.socket] = set()
        self.closed = False
        self.capacity_bytes = 0
        self.known = BackendStats()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            medium="network",
            delete=True,
            scan=True,
            ranged=True,
            shared=True,
            self_evicting=True,
            authenticated=True,
            pin=True,
            max_in_flight=6,
        )

    # -- life ------------------------------------------------------------------------------------

    def open(self, host: Host) -> Capabilities | None:
        self.capacity_bytes = host.capacity_bytes or 0
        call = _Opening(host.deadline_s)
        with self.connection(call) as (sock, rights):
            self.prove(sock, call)
        return self.narrow(rights)

    def prove(self, sock: socket.socket, call: Call) -> None:
        """Writing is tried before it is promised."""
        self.ask(sock, call, b"W")

    def narrow(self, rights: str) -> Capabilities | None:
        return replace(self.capabilities, delete=False) if "x" in rights else None

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # a forked child shares its parent's connections
        with self.lock:
            self.closed = True
            idle, self.idle = self.idle, []
            for sock in self.busy:
                self.wake(sock)
        for sock in idle:
            sock.close()

    def wake(self, sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is broken already

    # -- operations ------------------------------------------------------------------------------

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.done(index, self.put_one(item, call))

    def put_one(self, item: Item, call: Call) -> Outcome:
        with self.connection(call) as (sock, _):
            self.send(sock, call, b"P", item.key, nbytes=item.nbytes)
            for view in item.views:
                sock.settimeout(call.remaining())
                sock.sendall(host_memory(view))
            return self.outcome(*self.reply(sock, call))

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.done(index, self.get_one(item, call))

    def get_one(self, item: Item, call: Call) -> Outcome:
        with self.connection(call) as (sock, _):
            self.send(sock, call, b"G", item.key, int(not item.whole), item.offset, item.nbytes)
            status, nbytes, token = self.reply(sock, call)
            if status == b"K":
                self.fill(sock, item, nbytes, call)
            return self.outcome(status, nbytes, token)

    def fill(self, sock: socket.socket, item: Item, nbytes: int, call: Call) -> None:
        """Receives the value into the views."""
        for view in item.views:
            piece = min(view.nbytes, nbytes)
            recv_into(sock, host_memory(view)[:piece], call)
            nbytes -= piece

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.done(index, self.stat_one(key, call))

    def stat_one(self, key: StorageKey, call: Call) -> Outcome:
        return self.simple(b"S", key, call)

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.done(index, self.simple(b"X", key, call))

    def pin_many(self, keys: Sequence[StorageKey], ttl_s: float, call: Call) -> None:
        for index, key in enumerate(keys):
            call.done(index, self.pin_one(key, ttl_s, call))

    def pin_one(self, key: StorageKey, ttl_s: float, call: Call) -> Outcome:
        return self.simple(b"N", key, call, round(ttl_s * 1000))

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.connection(call) as (sock, _):
            self.send(sock, call, b"L", f"{prefix}/{cursor or ''}", limit)
            _, nbytes, more = self.reply(sock, call)
            text = bytearray(nbytes)
            recv_into(sock, memoryview(text), call)
        rows = [line.split() for line in text.decode().splitlines()]
        entries = [Entry(key=StorageKey(k), nbytes=int(n), token=int(t)) for k, n, t in rows]
        ours = [entry for entry in entries if KEY_PATTERN.fullmatch(entry.key)]
        return Page(entries=ours, cursor=entries[-1].key if more else None)

    def stats(self) -> BackendStats:
        """What the server said with its last answer."""
        return self.known

    # -- the wire --------------------------------------------------------------------------------

    @contextmanager
    def connection(self, call: Call) -> Iterator[tuple[socket.socket, str]]:
        """A connection for one exchange; one that fails in it is closed."""
        call.remaining()
        sock, rights = self.take(call)
        try:
            yield sock, rights
        except PermissionDenied:
            self.give_back(sock, whole=True)
            raise
        except TimeoutError:
            self.give_back(sock, whole=False)
            raise DeadlineExceeded("the server did not answer in time") from None
        except OSError as error:
            self.give_back(sock, whole=False)
            raise BackendUnavailable(f"the connection broke: {error}") from None
        except BaseException:
            self.give_back(sock, whole=False)
            raise
        self.give_back(sock, whole=True)

    def take(self, call: Call) -> tuple[socket.socket, str]:
        with self.lock:
            if self.closed:
                raise BackendClosed("closed")
            if self.idle:
                sock = self.idle.pop()
                self.busy.add(sock)
                return sock, ""
        try:
            sock = socket.create_connection((self.config.address, self.config.port), call.remaining())
        except OSError as error:
            raise BackendUnavailable(f"no connection to port {self.config.port}: {error}") from None
        with self.lock:
            self.busy.add(sock)
            closed = self.closed
        try:
            if closed:
                raise BackendClosed("closed")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock, self.log_in(sock, call)
        except OSError as error:
            self.give_back(sock, whole=False)
            raise BackendUnavailable(f"the connection broke: {error}") from None
        except BaseException:
            self.give_back(sock, whole=False)
            raise

    def log_in(self, sock: socket.socket, call: Call) -> str:
        nbytes, _ = self.ask(sock, call, b"A", self.config.password.reveal(), offset=self.capacity_bytes)
        rights = bytearray(nbytes)
        recv_into(sock, memoryview(rights), call)
        return rights.decode()

    def give_back(self, sock: socket.socket, *, whole: bool) -> None:
        with self.lock:
            self.busy.discard(sock)
            kept = whole and not self.closed
            if kept:
                self.idle.append(sock)
        if not kept:
            sock.close()

    def simple(self, verb: bytes, key: StorageKey, call: Call, number: int = 0) -> Outcome:
        with self.connection(call) as (sock, _):
            self.send(sock, call, verb, key, offset=number)
            return self.outcome(*self.reply(sock, call))

    def ask(
        self, sock: socket.socket, call: Call, verb: bytes, name: str = "", offset: int = 0
    ) -> tuple[int, int]:
        self.send(sock, call, verb, name, offset=offset)
        _, nbytes, token = self.reply(sock, call)
        return nbytes, token

    def send(
        self,
        sock: socket.socket,
        call: Call,
        verb: bytes,
        name: str = "",
        limit: int = 0,
        offset: int = 0,
        nbytes: int = 0,
    ) -> None:
        sock.settimeout(call.remaining())
        sock.sendall(REQUEST.pack(verb, len(name), limit, offset, nbytes) + name.encode())

    def reply(self, sock: socket.socket, call: Call) -> tuple[bytes, int, int]:
        head = bytearray(REPLY.size)
        recv_into(sock, memoryview(head), call)
        status, nbytes, token, entries, used = REPLY.unpack(head)
        self.known = BackendStats(entries=entries, used_bytes=used)
        if status == b"D":
            raise PermissionDenied("the server refuses this account")
        return status, nbytes, token

    def outcome(self, status: bytes, nbytes: int, token: int) -> Outcome:
        return Outcome(status=_STATUSES.get(status, Status.OK), nbytes=nbytes, token=token or None)
