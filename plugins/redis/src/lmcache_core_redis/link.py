"""One connection in the hands of one call: commands out, replies in. What it raises leaves it unusable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain

from lmcache_core.sdk import Call
from lmcache_core_redis.faults import Where
from lmcache_core_redis.node import Node
from lmcache_core_redis.resp import Buffer, Command, Place, Reply, ServerError, encode


class Link(ABC):
    """Replies come in the order of the commands; each is taken by `reply`, `bulk` or `array`.

    Any of these raises DeadlineExceeded, BackendUnavailable, OSError or RedisError.
    """

    def __init__(self, node: Node, where: Where) -> None:
        self.node = node
        self.where = where
        self._asking = False
        self._elements = 0

    def begin(self, call: Call, *, asking: bool) -> None:
        """Serves `call` from now on. `asking`: the cluster's node is asked for what it is only getting."""
        self._asking = asking
        self._elements = 0
        self._arm(call)

    def rest(self) -> None:
        """Lets go of the call, which holds the caller's memory."""
        self._arm(None)

    def send(self, commands: Iterable[Command]) -> None:
        if self._asking:
            commands = chain.from_iterable(((b"ASKING",), command) for command in commands)
        self._send(encode(commands))

    def reply(self) -> Reply:
        self._take_leave()
        return self._reply()

    def replies(self, count: int) -> list[Reply]:
        """The next `count` replies."""
        if self._asking or self._elements:
            return [self.reply() for _ in range(count)]
        return self._replies(count)

    def array(self) -> int | ServerError | None:
        """The number of replies in the array that comes next; they are taken one by one."""
        self._take_leave()
        count = self._array()
        self._elements = count if isinstance(count, int) else 0
        return count

    def bulk(self, place: Place) -> int | ServerError | None:
        """Receives the bulk string that comes next into `place(nbytes)` and returns its length."""
        self._take_leave()
        return self._bulk(place)

    def _take_leave(self) -> None:
        """Takes the answer about ASKING that comes before each reply, but not inside an array."""
        if self._elements:
            self._elements -= 1
        elif self._asking:
            self._reply()

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether an idle connection has ended, or has something to say that nobody asked for."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _arm(self, call: Call | None) -> None:
        """Bounds every wait by `call`; None: there will be none."""

    @abstractmethod
    def _send(self, buffers: Sequence[Buffer]) -> None: ...

    @abstractmethod
    def _reply(self) -> Reply: ...

    def _replies(self, count: int) -> list[Reply]:
        return [self._reply() for _ in range(count)]

    @abstractmethod
    def _array(self) -> int | ServerError | None: ...

    @abstractmethod
    def _bulk(self, place: Place) -> int | ServerError | None: ...
