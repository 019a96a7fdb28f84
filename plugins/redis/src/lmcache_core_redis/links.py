"""Connections that are kept: one call has each at a time, and one that failed is never used again."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import RedisError

from lmcache_core.sdk import BackendClosed, BackendError, Call
from lmcache_core_redis.dialling import Account, Sockets
from lmcache_core_redis.direct import DirectLink
from lmcache_core_redis.faults import Where
from lmcache_core_redis.link import Link
from lmcache_core_redis.node import Node
from lmcache_core_redis.plain import PlainLink
from lmcache_core_redis.resp import ServerError

log = logging.getLogger(__name__)


class Links:
    """The connections to all servers of a tier. Thread-safe; `close` ends every wait on one."""

    def __init__(self, account: Account, where: Callable[[Node], Where]) -> None:
        self._account = account
        self._where = where
        self._sockets = Sockets()
        self._plain = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._idle: dict[Node, list[Link]] = {}
        self._closed = False

    def begin(self) -> None:
        """Makes this process the owner: connections aren't shared with one that it forks."""
        self._pid = os.getpid()
        self._sockets.begin()

    def try_out(self, node: Node, call: Call) -> None:
        """Finds out whether this redis-py fits our receiver; falls back to its own, and says so, if not.

        Raises:
            BackendError: the server can't be reached or refuses.
        """
        sent, received = b"lmcache-core", bytearray(12)
        try:
            with self.to(node, call) as link:
                link.send([(b"PING", (sent[:3], memoryview(sent)[3:]))])
                answer = link.bulk(lambda nbytes: [memoryview(received)[:nbytes]])
                if isinstance(answer, ServerError):
                    raise link.where.of_server(answer)
                if answer != len(sent) or received != sent:
                    raise ValueError(f"{sent!r} came back as {bytes(received)!r}")
        except BackendError:
            raise
        except Exception:  # noqa: BLE001  # recorded boundary: what another redis-py may do with our receiver
            self._fall_back()

    @contextmanager
    def to(self, node: Node, call: Call, *, asking: bool = False) -> Iterator[Link]:
        """A connection to `node` for the block, which must leave no reply behind.

        Raises:
            BackendError: it can't be had, or broke inside the block.
        """
        if os.getpid() != self._pid:
            raise BackendClosed("used in a forked process")  # without its parent's locks and connections
        link: Link | None = None
        try:
            link = self._take(node, call)
            link.begin(call, asking=asking)
            yield link
        except BaseException as error:
            if link is not None:
                link.close()
            if not isinstance(error, OSError | RedisError | BackendError):
                raise
            self.drop_idle(node)  # what ended one connection has likely ended the others
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
        while True:
            with self._lock:
                if self._closed:
                    raise BackendClosed("closed")
                links = self._idle.get(node)
                link = links.pop() if links else None
            if link is None:
                call.remaining()
                where = self._where(node)
                if self._plain:
                    return PlainLink(node, where, self._account, call)
                return self._dial(node, where, call)
            if not link.stale:
                return link
            link.close()

    def _dial(self, node: Node, where: Where, call: Call) -> Link:
        try:
            return DirectLink(node, where, self._account, call, self._sockets)
        except (OSError, RedisError, BackendError):
            raise
        except Exception:  # noqa: BLE001  # recorded boundary, as in `try_out`
            self._fall_back()
            return PlainLink(node, where, self._account, call)

    def _fall_back(self) -> None:
        """Uses redis-py as it comes from now on. To be called where an error is handled."""
        log.warning(
            "redis-py %s doesn't work with this backend's zero-copy receiver: values are copied, "
            "which is slower; install a redis that the backend was tested with",
            redis.__version__,
            exc_info=True,
        )
        self._plain = True

    def _give_back(self, node: Node, link: Link) -> None:
        link.rest()
        with self._lock:
            if not self._closed:
                self._idle.setdefault(node, []).append(link)
                return
        link.close()

    def drop_idle(self, node: Node) -> None:
        """Closes the connections to `node` that nobody uses."""
        with self._lock:
            links = self._idle.pop(node, [])
        for link in links:
            link.close()
