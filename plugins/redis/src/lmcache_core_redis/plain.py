"""The way around our own receiver, for a redis-py that it doesn't fit: correct, with copies, and slower."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence

from redis.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from lmcache_core.sdk import Call
from lmcache_core_redis.dialling import Account, plain_connection
from lmcache_core_redis.faults import Where
from lmcache_core_redis.link import Link
from lmcache_core_redis.node import Node
from lmcache_core_redis.resp import Buffer, Place, Reply, ServerError


class PlainLink(Link):
    """Uses redis-py as it comes; its own time-outs begin anew with each byte, so a timer ends the call.

    `close` wakes nobody.
    """

    def __init__(self, node: Node, where: Where, account: Account, call: Call) -> None:
        super().__init__(node, where)
        self._call: Call | None = call
        self._queue: deque[Reply] = deque()
        self._timer: threading.Timer | None = None
        self._connection: AbstractConnection = plain_connection(node, account, call.remaining())
        self._connection.connect()  # type: ignore[no-untyped-call]  # redis-py's

    def _arm(self, call: Call | None) -> None:
        self._call = call
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if call is not None:
            self._timer = threading.Timer(call.remaining(), self._cut)
            self._timer.daemon = True
            self._timer.start()

    def _cut(self) -> None:
        sock: object = getattr(self._connection, "_sock", None)
        if isinstance(sock, socket.socket):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # as in `Sockets.shut`

    @property
    def stale(self) -> bool:
        try:
            return self._connection.can_read()
        except RedisError:
            return True

    def close(self) -> None:
        self._arm(None)
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _send(self, buffers: Sequence[Buffer]) -> None:
        self._remaining()
        self._connection.send_packed_command(buffers)  # type: ignore[no-untyped-call]

    def _remaining(self) -> float:
        assert self._call is not None
        return self._call.remaining()

    def _reply(self) -> Reply:
        if self._queue:
            return self._queue.popleft()
        try:
            reply: object = self._connection.read_response(disable_decoding=True, timeout=self._remaining())
        except ResponseError as error:
            reply = error
        return _ours(reply)

    def _array(self) -> int | ServerError | None:
        reply = self._reply()
        if not isinstance(reply, list):
            return reply if isinstance(reply, ServerError) else None
        self._queue.extend(reply)
        return len(reply)

    def _bulk(self, place: Place) -> int | ServerError | None:
        reply = self._reply()
        if not isinstance(reply, bytes):
            return reply if isinstance(reply, ServerError) else None
        position, memory = 0, memoryview(reply)
        for target in place(len(reply)):
            target[:] = memory[position : position + len(target)]
            position += len(target)
        return len(reply)


def _ours(reply: object) -> Reply:
    if isinstance(reply, ResponseError):
        code = reply.status_code
        return ServerError(f"{code} {reply}" if code else str(reply))
    if isinstance(reply, list):
        return [_ours(element) for element in reply]
    assert reply is None or isinstance(reply, bytes | int)
    return reply
