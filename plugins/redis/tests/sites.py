"""Sites: servers behind one proxy, reached by the backend through the proxy and by the tests past it."""

from __future__ import annotations

import binascii
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from lmcache_core_conformance.network import Proxy, free_ports

from .servers import ADMIN, ADMIN_PASSWORD, Server
from .users import (
    CLUSTER_RULE,
    PINS_RULE,
    RULE,
    TIER,
    TIER_PASSWORD,
    Certificates,
    make_certificates,
    users,
)

NUM_SLOTS = 16384
NODES = 3
POLL_S = 0.01
FORMED_S = 30.0


class Site:
    """One server, with the users of `users.py`, behind a proxy."""

    rule: tuple[str, ...] = (*RULE, *PINS_RULE)

    def __init__(self, binary: str, settings: Mapping[str, object] | None = None) -> None:
        self.servers = self.make_servers(binary, dict(settings or {}))
        self.nodes: list[redis.Redis] = [server.client() for server in self.servers]
        for server in self.servers:
            server.start()

    def make_servers(self, binary: str, settings: dict[str, object]) -> list[Server]:
        """The servers, not yet started, and `self.proxy` in front of them."""
        server = Server(binary, settings=settings, users=users(self.rule))
        self.proxy = Proxy([server.port])
        return [server]

    def options(
        self, namespace: str, username: str = TIER, password: str = TIER_PASSWORD, port: int = 0
    ) -> dict[str, object]:
        """What leads a backend to this site."""
        return {
            "url": f"redis://127.0.0.1:{port or self.proxy.ports[0]}",
            "username": username,
            "password": password,
            "namespace": namespace,
        }

    def node_of(self, key: str) -> int:
        """Which node holds a key."""
        return 0

    def client_of(self, key: str) -> redis.Redis:
        return self.nodes[self.node_of(key)]

    def flush(self) -> None:
        """Leaves the servers empty, their memory free: until it is, one with `maxmemory` may refuse puts."""
        for node in self.nodes:
            node.execute_command("FLUSHALL", "SYNC")

    def configure(self, **settings: object) -> None:
        for node in self.nodes:
            for name, value in settings.items():
                node.config_set(name.replace("_", "-"), value)

    def wait_until_serving(self) -> None:
        """Returns when commands are served again."""

    @contextmanager
    def killed(self) -> Iterator[None]:
        with self.proxy.faulty("killed"):
            for server in self.servers:
                server.kill()
            try:
                yield
            finally:
                for server in self.servers:
                    server.start()
                self.wait_until_serving()

    @contextmanager
    def full(self) -> Iterator[None]:
        """While inside, not one byte more is taken, and nothing makes room."""
        before = self.nodes[0].config_get("maxmemory*")
        self.configure(maxmemory_policy="noeviction", maxmemory=1)
        try:
            yield
        finally:
            self.configure(maxmemory=before["maxmemory"], maxmemory_policy=before["maxmemory-policy"])

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """While inside, the tier's user may change nothing."""
        self._allow("-@write")
        try:
            yield
        finally:
            self._allow("-@all", *self.rule)

    def _allow(self, *rules: str) -> None:
        for node in self.nodes:
            node.execute_command("ACL", "SETUSER", TIER, *rules)


class TlsSite(Site):
    """As `Site`, with TLS only, and clients must show a certificate."""

    rule = RULE

    def make_servers(self, binary: str, settings: dict[str, object]) -> list[Server]:
        self._folder = tempfile.TemporaryDirectory(prefix="lmcache-redis-tls-")
        self.certificates: Certificates = make_certificates(Path(self._folder.name))
        port = free_ports(1)[0]
        server = Server(
            binary,
            port=port,
            users=users(self.rule),
            settings={
                **settings,
                "port": 0,
                "tls-port": port,
                "tls-cert-file": self.certificates.server,
                "tls-key-file": self.certificates.server_key,
                "tls-ca-cert-file": self.certificates.authority,
            },
            connect={
                "ssl": True,
                "ssl_ca_certs": str(self.certificates.authority),
                "ssl_certfile": str(self.certificates.client),
                "ssl_keyfile": str(self.certificates.client_key),
            },
        )
        self.proxy = Proxy([server.port])
        return [server]

    def options(
        self, namespace: str, username: str = TIER, password: str = TIER_PASSWORD, port: int = 0
    ) -> dict[str, object]:
        return {
            **super().options(namespace, username, password),
            "url": f"rediss://127.0.0.1:{port or self.proxy.ports[0]}",
            "tls_ca": str(self.certificates.authority),
            "tls_cert": str(self.certificates.client),
            "tls_key": str(self.certificates.client_key),
        }


class ClusterSite(Site):
    """Three masters, each with a third of the slots; they announce the proxy's ports to clients."""

    rule = (*RULE, *CLUSTER_RULE)

    def __init__(self, binary: str, settings: Mapping[str, object] | None = None) -> None:
        self._moved: dict[int, int] = {}
        super().__init__(binary, settings)
        ports = [server.port for server in self.servers]
        for number, node in enumerate(self.nodes):
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            first, last = (NUM_SLOTS * n // NODES for n in (number, number + 1))
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        for port, bus in zip(ports[1:], self._bus_ports[1:], strict=True):
            self.nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        self.wait_until_serving()

    def make_servers(self, binary: str, settings: dict[str, object]) -> list[Server]:
        ports, self._bus_ports = free_ports(NODES), free_ports(NODES)
        self.proxy = Proxy(ports)
        return [
            Server(
                binary,
                port=port,
                users=users(self.rule),
                settings={
                    **settings,
                    "cluster-enabled": "yes",
                    "cluster-port": bus,
                    "cluster-announce-ip": "127.0.0.1",
                    "cluster-announce-port": announced,
                    "cluster-announce-bus-port": bus,
                    "cluster-node-timeout": 2000,
                },
            )
            for port, bus, announced in zip(ports, self._bus_ports, self.proxy.ports, strict=True)
        ]

    def options(
        self, namespace: str, username: str = TIER, password: str = TIER_PASSWORD, port: int = 0
    ) -> dict[str, object]:
        return {**super().options(namespace, username, password, port), "cluster": True}

    def node_of(self, key: str) -> int:
        slot = slot_of(key)
        at_first = next(n for n in range(NODES) if slot < NUM_SLOTS * (n + 1) // NODES)
        return self._moved.get(slot, at_first)

    @contextmanager
    def moving(self, key: str, to: int) -> Iterator[None]:
        """Inside, the slot of `key` is on its way to node `to`, with what was in it there already."""
        slot, source, target = slot_of(key), self.nodes[self.node_of(key)], self.nodes[to]
        ids = [node.execute_command("CLUSTER", "MYID") for node in (source, target)]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        names = source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        if names:
            auth = ("AUTH2", ADMIN, ADMIN_PASSWORD)
            port = self.servers[to].port
            source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, *auth, "KEYS", *names)
        yield
        self._moved[slot] = to
        for node in (target, source, *self.nodes):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    def wait_until_serving(self) -> None:
        def serves(node: redis.Redis) -> bool:
            try:
                told: Any = node.execute_command("CLUSTER", "INFO")
            except redis.ConnectionError:
                return False
            lines = (
                told if isinstance(told, dict) else dict(line.split(":") for line in told.decode().split())
            )
            return lines["cluster_state"] == "ok" and int(lines["cluster_known_nodes"]) == NODES

        wait_until(lambda: all(serves(node) for node in self.nodes), FORMED_S)


def slot_of(key: str) -> int:
    """The slot of a key, by its hash tag where it has one."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return binascii.crc_hqx((tag if opened and closed and tag else key).encode(), 0) % NUM_SLOTS


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Asks again and again, since a server can't be told to call.

    Raises:
        TimeoutError: it wasn't so within `timeout_s`.
    """
    until, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not so within {timeout_s} s: {condition}")
        pause.wait(POLL_S)
