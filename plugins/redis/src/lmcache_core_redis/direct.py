"""The way that data takes: a socket of redis-py's, written from and received into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.sdk import Call
from lmcache_core_redis.dialling import Account, Sockets, bounded_connection
from lmcache_core_redis.faults import Where
from lmcache_core_redis.link import Link
from lmcache_core_redis.node import Node
from lmcache_core_redis.resp import Buffer, Place, Reply, ServerError


class DirectLink(Link):
    def __init__(self, node: Node, where: Where, account: Account, call: Call, sockets: Sockets) -> None:
        super().__init__(node, where)
        self._connection, self._receiver = bounded_connection(node, account, call, sockets)
        self._connection.connect()  # type: ignore[no-untyped-call]  # redis-py's

    def _arm(self, call: Call | None) -> None:
        self._connection.call = None  # which was for connecting
        self._receiver.arm(call)

    @property
    def stale(self) -> bool:
        return self._receiver.stirs

    def close(self) -> None:
        self._connection.disconnect()
        self._receiver.arm(None)

    def _send(self, buffers: Sequence[Buffer]) -> None:
        self._receiver.sock.send(buffers)

    def _reply(self) -> Reply:
        return self._receiver.reply()

    def _replies(self, count: int) -> list[Reply]:
        return self._receiver.replies(count)

    def _array(self) -> int | ServerError | None:
        return self._receiver.array()

    def _bulk(self, place: Place) -> int | ServerError | None:
        return self._receiver.bulk(place)
