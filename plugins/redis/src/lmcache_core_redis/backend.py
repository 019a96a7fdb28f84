"""The redis backend: values as hashes on a server, cluster or Sentinel group that several engines share."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from lmcache_core.sdk import (
    Backend,
    BackendClosed,
    BackendError,
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    StorageKey,
)
from lmcache_core_redis import asking
from lmcache_core_redis.batch import Batch
from lmcache_core_redis.config import RedisConfig
from lmcache_core_redis.dialling import Account
from lmcache_core_redis.faults import Where
from lmcache_core_redis.getting import Getter
from lmcache_core_redis.layout import Names
from lmcache_core_redis.links import Link, Links
from lmcache_core_redis.node import Node, parse_url
from lmcache_core_redis.writing import Writer

log = logging.getLogger(__name__)

Run = Callable[[Link, Sequence[int]], None]


class RedisBackend(Backend[RedisConfig]):
    config_class = RedisConfig

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        servers = parse_url(config.url)
        self._names = Names(config.namespace)
        self._account = Account(
            username=config.username,
            password=config.password,
            db=servers.db,
            tls=servers.tls,
            tls_ca=config.tls_ca,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
        )
        self._node = servers.nodes[0]
        self._links = Links(self._account, self._where)
        self._getter = Getter(self._names, config.piece_bytes)
        self._writer = Writer(self._names, config.piece_bytes, config.ttl, 5.0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            medium="network",
            delete=True,
            ranged=True,
            persistent=True,
            shared=True,
            self_evicting=True,
            authenticated=True,
            max_in_flight=self._config.max_in_flight,
        )

    def open(self, host: Host) -> None:
        pass

    def close(self) -> None:
        self._links.close()

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        batch = Batch([item.key for item in items], call)
        self._spread(batch, lambda link, indexes: self._writer.put(link, items, indexes, batch))

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        batch = Batch([item.key for item in items], call)
        self._spread(batch, lambda link, indexes: self._getter.get(link, items, indexes, batch))

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        batch = Batch(keys, call)
        self._spread(batch, lambda link, indexes: asking.stat(link, self._names, indexes, batch))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        batch = Batch(keys, call)
        self._spread(batch, lambda link, indexes: asking.delete(link, self._names, indexes, batch))

    def stats(self) -> BackendStats:
        return BackendStats()

    def _spread(self, batch: Batch, run: Run) -> None:
        with self._links.to(self._node, batch.call) as link:
            run(link, range(len(batch.keys)))

    def _where(self, node: Node) -> Where:
        return Where(node, self._account.user, self._config.namespace)
