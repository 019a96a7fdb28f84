"""The redis backend: values as hashes on a server, cluster or Sentinel group that several engines share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lmcache_core.sdk import (
    Backend,
    BackendError,
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    NotSupported,
    Page,
    Status,
    StorageKey,
)
from lmcache_core_redis import asking, opening, scanning
from lmcache_core_redis.batch import Batch
from lmcache_core_redis.config import RedisConfig
from lmcache_core_redis.deadlines import Within
from lmcache_core_redis.dialling import Account
from lmcache_core_redis.faults import Where
from lmcache_core_redis.getting import Getter
from lmcache_core_redis.layout import Names
from lmcache_core_redis.link import Link
from lmcache_core_redis.links import Links
from lmcache_core_redis.node import Node, Servers, parse_url
from lmcache_core_redis.parallel import at_once
from lmcache_core_redis.pins import Pins
from lmcache_core_redis.routes import ClusterMap, OneServer, Routes, SentinelPrimary
from lmcache_core_redis.writing import Writer

_OPENING_SHARE = 0.9
"""So that our own error, which says what is wrong, comes before the core's, which says that it is late."""
Run = Callable[[Link, Sequence[int]], None]
"""Does an operation for some items of a batch on one server, and settles them."""


class RedisBackend(Backend[RedisConfig]):
    """Stores each value as one hash, so that the server evicts, expires and deletes it as a whole.

    Values are shared by everyone who uses the namespace. Every wait ends with its call, or with `close`.
    """

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
        self._links = Links(self._account, self._where)
        self._to_sentinels = Links(
            replace(
                self._account, username=config.sentinel_username, password=config.sentinel_password, db=0
            ),
            self._where,
        )
        self._routes = self._routes_to(servers)
        self._pins = Pins(self._names, config.ttl) if config.pin and config.ttl is not None else None
        self._getter = Getter(config.piece_bytes)
        self._writer = Writer(self._names, config.piece_bytes, config.ttl, keeps_pins=self._pins is not None)
        self._pin_offered = False
        self._lock = threading.Lock()  # guards the counters
        self._counters: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            medium="network",
            delete=True,
            scan=True,
            ranged=True,
            persistent=True,
            shared=True,
            self_evicting=True,
            authenticated=True,
            pin=self._config.pin,
            max_in_flight=self._config.max_in_flight,
            stat_cost_s=0.001,
        )

    def open(self, host: Host) -> Capabilities:
        call = Within(host.deadline_s * _OPENING_SHARE)
        self._account.check_files()
        self._links.begin()
        self._to_sentinels.begin()
        key = opening.probe_key()
        offered = self.capabilities
        for node in self._routes.spread([self._names.value(key)], call):
            self._links.try_out(node, call)
            with self._links.to(node, call) as link:
                offered = opening.prove_access(link, self._names, key, offered, cluster=self._config.cluster)
                if self._pins is not None:
                    self._pin_offered = opening.can_pin(link)
                    self._pins.sweep(link)
        return replace(offered, pin=self._pin_offered)

    def close(self) -> None:
        self._links.close()
        self._to_sentinels.close()

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        batch = Batch([item.key for item in items], self._names, call)
        self._run(
            "put", batch, lambda link, indexes: self._put(link, items, indexes, batch), follows_ask=False
        )

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        batch = Batch([item.key for item in items], self._names, call)
        self._run("get", batch, lambda link, indexes: self._getter.get(link, items, indexes, batch))

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        batch = Batch(keys, self._names, call)
        self._run("stat", batch, lambda link, indexes: asking.stat(link, indexes, batch))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        batch = Batch(keys, self._names, call)
        self._run("delete", batch, lambda link, indexes: asking.delete(link, indexes, batch))

    def pin_many(self, keys: Sequence[StorageKey], ttl_s: float, call: Call) -> None:
        pins = self._pins
        if pins is None or not self._pin_offered:
            raise NotSupported("this server keeps no pins", op="pin")
        batch = Batch(keys, self._names, call)
        self._run("pin", batch, lambda link, indexes: pins.pin(link, indexes, ttl_s, batch))

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        try:
            return scanning.scan(self._routes, self._links, self._names, call, prefix, cursor, limit)
        except BackendError:
            self._routes.doubt()
            raise

    def stats(self) -> BackendStats:
        """Counters of this process alone: what the server holds can't be known without asking it."""
        with self._lock:
            return BackendStats(counters=dict(self._counters))

    # -- inside ----------------------------------------------------------------------------------

    def _put(self, link: Link, items: Sequence[Item], indexes: Sequence[int], batch: Batch) -> None:
        self._writer.put(link, items, indexes, batch)
        if self._pin_offered and self._pins is not None:
            self._pins.sweep(link)

    def _run(self, op: str, batch: Batch, run: Run, *, follows_ask: bool = True) -> None:
        """Runs an operation on each server that has some of the batch's items; follows redirects once."""
        spread = self._routes.spread(batch.names, batch.call)
        self._run_on_each({(node, False): indexes for node, indexes in spread.items()}, batch, run)
        redirects, batch.redirects = batch.redirects, []
        further: dict[tuple[Node, bool], list[int]] = {}
        for redirect in redirects:
            if not self._config.cluster or (redirect.asking and not follows_ask):
                batch.fail([redirect.index], self._where(redirect.node).of_server(redirect.error))
            else:
                further.setdefault((redirect.node, redirect.asking), []).append(redirect.index)
        self._run_on_each(further, batch, run)
        for redirect in batch.redirects:
            batch.fail([redirect.index], self._where(redirect.node).of_server(redirect.error))
        with self._lock:
            for status in Status:
                if count := batch.statuses.count(status):
                    self._counters[f"{op}_{status.value}"] += count

    def _run_on_each(self, spread: Mapping[tuple[Node, bool], Sequence[int]], batch: Batch, run: Run) -> None:
        """Runs on all of these nodes at once, so that a dead one costs the others' items no time.

        The flag says whether a node is only getting what it is asked for.
        """
        at_once(
            [
                partial(self._run_on, node, indexes, batch, run, asking=asking)
                for (node, asking), indexes in spread.items()
            ]
        )

    def _run_on(
        self, node: Node, indexes: Sequence[int], batch: Batch, run: Run, *, asking: bool = False
    ) -> None:
        """Every item of `indexes` is settled or redirected when it returns."""
        try:
            with self._links.to(node, batch.call, asking=asking) as link:
                run(link, indexes)
        except BackendError as error:
            self._routes.doubt()
            batch.fail(indexes, error)
        if node in batch.misled:
            batch.misled.discard(node)
            self._routes.doubt()
            self._links.drop_idle(node)

    def _routes_to(self, servers: Servers) -> Routes:
        if self._config.cluster:
            return ClusterMap(servers.nodes, self._links)
        if self._config.sentinel is not None:
            return SentinelPrimary(self._config.sentinel, servers.nodes, self._to_sentinels)
        return OneServer(servers.nodes[0])

    def _where(self, node: Node) -> Where:
        config = self._config
        return Where(
            node,
            self._account.user,
            config.namespace,
            cluster=config.cluster,
            sentinel=config.sentinel,
            secrets=(config.password, config.sentinel_password),
        )
