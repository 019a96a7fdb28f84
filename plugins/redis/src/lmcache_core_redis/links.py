"""Connections that are kept: one call has each at a time, and one that failed is never used again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from redis.connection import AbstractConnection
from redis.exceptions import RedisError

from lmcache_core.sdk import BackendClosed, BackendError, Call
from lmcache_core_redis.dialling import Account, Sockets, dial
from lmcache_core_redis.faults import Where
from lmcache_core_redis.node import Node
from lmcache_core_redis.resp import Buffer, Command, Place, Receiver, Reply, ServerError, encode

_TLS_SLICE_NBYTES = 1 << 18


class Link:
    """One connection, in the hands of one call. What it raises leaves it unusable."""

    def __init__(
        self, node: Node, where: Where, connection: AbstractConnection, receiver: Receiver, *, tls: bool
    ) -> None:
        self.node = node
        self.where = where
        self._connection = connection
        self._receiver = receiver
        self._tls = tls

    def begin(self, call: Call) -> None:
        self._receiver.call = call

    def send(self, commands: Iterable[Command]) -> None:
        for buffer in encode(commands):
            self._send(buffer)

    def reply(self) -> Reply:
        return self._receiver.reply()

    def array(self) -> int | None | ServerError:
        return self._receiver.array()

    def bulk(self, place: Place) -> int | None | ServerError:
        return self._receiver.bulk(place)

    def _send(self, buffer: Buffer) -> None:
        sock, call = self._receiver.ready()
        if not self._tls:
            sock.settimeout(call.remaining())
            sock.sendall(buffer)  # its time-out bounds the whole
            return
        memory, sent = memoryview(buffer), 0
        while sent < len(memory):
            sock.settimeout(call.remaining())
            sent += sock.send(memory[sent : sent + _TLS_SLICE_NBYTES])

    @property
    def stale(self) -> bool:
        """Whether an idle connection has ended, or has something to say that nobody asked for."""
        return self._receiver.stirs()

    def close(self) -> None:
        self._connection.disconnect()
        self._receiver.call = None


class Links:
    """The connections to all servers of a tier. Thread-safe; `close` ends every wait on one."""

    def __init__(self, account: Account, where: Callable[[Node], Where]) -> None:
        self._account = account
        self._where = where
        self._sockets = Sockets()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._idle: dict[Node, list[Link]] = {}
        self._closed = False

    @contextmanager
    def to(self, node: Node, call: Call) -> Iterator[Link]:
        """A connection to `node` for the block, which must leave no reply behind.

        Raises:
            BackendError: it can't be had, or broke inside the block.
        """
        link: Link | None = None
        try:
            link = self._take(node, call)
            link.begin(call)
            yield link
        except BaseException as error:
            if link is not None:
                link.close()
            if not isinstance(error, OSError | RedisError | BackendError):
                raise
            self._drop_idle(node)  # what ended one connection has likely ended the others
            if self._closed:
                raise BackendClosed("closed while the call ran") from None
            raise self._where(node).of_connection(error) from None
        self._give_back(node, link)

    def close(self) -> None:
        """In a forked child nothing happens: the connections are its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        self._sockets.shut()
        for links in idle.values():
            for link in links:
                link.close()

    def _take(self, node: Node, call: Call) -> Link:
        if os.getpid() != self._pid:
            raise BackendClosed("used in a forked process")
        while True:
            with self._lock:
                if self._closed:
                    raise BackendClosed("closed")
                links = self._idle.get(node)
                link = links.pop() if links else None
            if link is None:
                call.remaining()
                connection, receiver = dial(node, self._account, call, self._sockets)
                return Link(node, self._where(node), connection, receiver, tls=self._account.tls)
            if not link.stale:
                return link
            link.close()

    def _give_back(self, node: Node, link: Link) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(node, []).append(link)
                return
        link.close()

    def _drop_idle(self, node: Node) -> None:
        with self._lock:
            links = self._idle.pop(node, [])
        for link in links:
            link.close()
