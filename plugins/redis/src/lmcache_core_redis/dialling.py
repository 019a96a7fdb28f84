"""Connecting: redis-py's connections, with every wait of theirs bounded by the call that needs one."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from lmcache_core.sdk import BackendUnavailable, Call, DeadlineExceeded, Secret
from lmcache_core_redis.node import Node
from lmcache_core_redis.resp import Receiver

_NO_TIME_S = 0.001
_NO_PASSPHRASE = ""
"""A key that needs one is refused. Without this, OpenSSL asks for it on the terminal, and waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who we are to a server, and how it proves that it is the right one."""

    username: str | None = None
    password: Secret | None = field(default=None, repr=False)
    db: int = 0
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def user(self) -> str:
        return self.username or "default"

    def check_files(self) -> None:
        """
        Raises:
            BackendUnavailable: a TLS file can't be used. A connection's own message doesn't say which.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        told = ""
        try:
            if self.tls_ca is not None:
                told = f"tls_ca: {self.tls_ca}"
                context.load_verify_locations(self.tls_ca)
            if self.tls_cert is not None:
                told = f"tls_cert, tls_key (which may have no passphrase): {self.tls_cert}, {self.tls_key}"
                context.load_cert_chain(self.tls_cert, self.tls_key, password=_NO_PASSPHRASE)
        except OSError as error:
            raise BackendUnavailable(f"{told} can't be used: {error.strerror}") from None


class Sockets:
    """The open sockets of one process, so that all waits on them can be ended at once. Thread-safe."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: the garbage collector disconnects, too
        self._sockets: dict[int, socket.socket] = {}  # a socket is closed only after it has left
        self._closed = False

    def begin(self) -> None:
        """Makes this process the one."""
        self._pid = os.getpid()

    def enter(self, owner: object, sock: socket.socket) -> None:
        """
        Raises:
            ConnectionAbortedError: they have been shut.
        """
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            self._sockets[id(owner)] = sock

    def leave(self, owner: object) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._sockets.pop(id(owner), None)

    def shut(self) -> None:
        """Whoever waits on one of them finds its end. A forked child leaves its parent's alone."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for sock in list(self._sockets.values()):
                try:
                    # Not the TLS socket's own method, after which others would read it as plain bytes.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected yet, or not any more


class BoundedConnection(AbstractConnection):
    """Time-outs come from the call; the socket can be shut from the first wait on it."""

    call: Call | None
    sockets: Sockets

    def disconnect(self, *args: object, **kwargs: object) -> None:
        self.sockets.leave(self)
        super().disconnect(*args, **kwargs)  # type: ignore[no-untyped-call]  # redis-py's

    @property
    def socket_timeout(self) -> float:
        return _left(self.call)

    @socket_timeout.setter
    def socket_timeout(self, value: float | None) -> None:
        """redis-py sets a default, which isn't used."""

    @property
    def socket_connect_timeout(self) -> float:
        return _left(self.call)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, value: float | None) -> None:
        """As above."""

    def reach(self, sock: socket.socket, address: tuple[Any, ...] | str, share: float = 1.0) -> None:
        """Connects `sock` within this share of what remains of the call, or closes it and raises."""
        try:
            self.sockets.enter(self, sock)
            sock.settimeout(_left(self.call) * share)
            sock.connect(address)
        except BaseException:
            self.sockets.leave(self)
            sock.close()
            raise


class _BoundedTcp(BoundedConnection, Connection):
    def _connect(self) -> socket.socket:
        last = OSError("the name has no address")
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError(f"not the name of a host: {error}") from None
        for position, (family, kind, protocol, _, address) in enumerate(found):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.reach(sock, address, 1 / (len(found) - position))
                return sock
            except OSError as error:
                last = error
        raise last


class _BoundedTls(_BoundedTcp, SSLConnection):
    def _connect(self) -> ssl.SSLSocket:
        sock = super()._connect()
        with sock.dup() as twin:  # wrapping takes `sock` apart
            try:
                self.sockets.enter(self, twin)
                sock.settimeout(_left(self.call))
                wrapped: ssl.SSLSocket = self._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]
                self.sockets.enter(self, wrapped)
            except BaseException as error:
                self.sockets.leave(self)
                sock.close()
                if isinstance(error, TimeoutError):  # so ends, too, what a server without TLS waits for
                    raise OSError("no TLS handshake in time; does the server speak TLS?") from None
                raise
        return wrapped


class _BoundedUnix(BoundedConnection, UnixDomainSocketConnection):
    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.reach(sock, self.path)
        return sock


def bounded_connection(
    node: Node, account: Account, call: Call, sockets: Sockets
) -> tuple[BoundedConnection, Receiver]:
    """A connection to `node`, not yet made, and what will receive its replies. `call` bounds every wait."""
    kind: Callable[..., BoundedConnection] = (
        _BoundedUnix if node.path else _BoundedTls if account.tls else _BoundedTcp
    )
    connection = kind(**_options(node, account), parser_class=Receiver)
    receiver = connection._get_parser()
    assert isinstance(receiver, Receiver)
    connection.call = call
    receiver.arm(call)
    connection.sockets = sockets
    return connection, receiver


def plain_connection(node: Node, account: Account, timeout_s: float) -> AbstractConnection:
    """As `bounded_connection`, without anything of ours inside: `timeout_s` bounds each operation."""
    kind: Callable[..., AbstractConnection] = Connection
    if node.path or account.tls:
        kind = UnixDomainSocketConnection if node.path else SSLConnection
    return kind(**_options(node, account), socket_timeout=timeout_s, socket_connect_timeout=timeout_s)


def _options(node: Node, account: Account) -> dict[str, Any]:
    """The arguments of redis-py's connections. It retries nothing unless told to."""
    options: dict[str, Any] = {
        "db": account.db,
        "username": account.username,
        "password": account.password.reveal() if account.password is not None else None,
        "protocol": 2,
        "driver_info": None,
    }
    if node.path:
        return options | {"path": node.path}
    options |= {"host": node.host, "port": node.port}
    if account.tls:
        files = {
            "ssl_ca_certs": account.tls_ca,
            "ssl_certfile": account.tls_cert,
            "ssl_keyfile": account.tls_key,
        }
        options |= {name: str(path) for name, path in files.items() if path is not None}
        options["ssl_password"] = _NO_PASSPHRASE
    return options


def _left(call: Call | None) -> float:
    """What remains of the call. Not nothing, which means "don't wait", nor an error amid redis-py's code."""
    try:
        return call.remaining() if call is not None else _NO_TIME_S
    except DeadlineExceeded:
        return _NO_TIME_S
