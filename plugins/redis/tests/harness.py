"""Every hook of the conformance suite, over a site of real servers."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import redis

from lmcache_core.sdk import StorageKey
from lmcache_core_conformance import Fault, Harness
from lmcache_core_conformance.network import free_ports
from lmcache_core_redis.backend import RedisBackend

from . import behind
from .bare import PIECE_NBYTES, BareConnection, BareDriver
from .sites import Site, TlsSite
from .users import NAMESPACES, NARROW, NARROW_PASSWORD, TIER, TIER_PASSWORD, WRONG_PASSWORD

PINS = {"ttl": "1h", "pin": True}
"""Options with which the backend offers pins, of a server that evicts only what expires."""
SMALL_OVERHEAD_BYTES = 2 << 20
"""What an empty server takes of its own `maxmemory`."""


class SiteHarness(Harness):
    """One site for all stores, each in a namespace of its own; a small one for those that fill it.

    Both are started on first use. `extra` are options of every store.
    """

    backend = RedisBackend

    def __init__(
        self, make_site: Callable[[Mapping[str, object]], Site], extra: Mapping[str, object] | None = None
    ) -> None:
        self._make_site = make_site
        self._extra = dict(extra or {})
        self._settings = {"maxmemory-policy": "volatile-lru" if "ttl" in self._extra else "allkeys-lru"}
        self._sites: dict[str, Site] = {}
        self._property: Path | None = None
        self._small: set[Path] = set()

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        if self._property != tmp.parent:  # nobody looks back at the stores of another property
            self._property = tmp.parent
            self.site.flush()
        return {**self.site.options(_namespace(tmp)), **self._extra}

    def small_config(self, tmp: Path) -> Mapping[str, object]:
        bound = self.small_capacity_bytes // len(self.small_site.nodes) + SMALL_OVERHEAD_BYTES
        self.small_site.configure(maxmemory=bound)
        self.small_site.flush()
        self._small.add(tmp)
        return {**self.small_site.options(_namespace(tmp)), **self._extra}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        return {**self.site.options(_namespace(tmp), port=free_ports(1)[0]), **self._extra}

    def wrong_credentials(self, tmp: Path) -> Mapping[str, object]:
        return {**self.site.options(_namespace(tmp), TIER, WRONG_PASSWORD), **self._extra}

    def narrower_credentials(self, tmp: Path) -> Mapping[str, object]:
        return {**self.site.options(_namespace(tmp), NARROW, NARROW_PASSWORD), **self._extra}

    def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
        return behind.read(*self._find(tmp, key))

    def raw_put(self, tmp: Path, key: StorageKey, value: bytes) -> None:
        behind.damage(*self._find(tmp, key), value)

    def raw_delete(self, tmp: Path, key: StorageKey) -> None:
        client, name = self._find(tmp, key)
        client.delete(name)

    def litter(self, tmp: Path) -> None:
        behind.litter(self.site.client_of, _namespace(tmp))

    def medium_objects(self, tmp: Path) -> int:
        return sum(behind.count(node, _namespace(tmp)) for node in self.site.nodes)

    def num_requests(self, tmp: Path) -> int:
        return self.site.proxy.num_requests

    def raw_driver(self, tmp: Path) -> BareDriver:
        context = None
        if isinstance(self.site, TlsSite):
            certificates = self.site.certificates
            context = ssl.create_default_context(cafile=certificates.authority)
            context.load_cert_chain(certificates.client, certificates.client_key)
        connections = [BareConnection(port, TIER, TIER_PASSWORD, context) for port in self.site.proxy.ports]
        piece_nbytes = self._extra.get("piece_bytes", PIECE_NBYTES)
        assert isinstance(piece_nbytes, int)
        return BareDriver(connections, self.site.node_of, _namespace(tmp), piece_nbytes)

    def faulty(self, tmp: Path, fault: Fault) -> AbstractContextManager[None]:
        site = self.site
        by_the_server = {Fault.KILLED: site.killed, Fault.FULL: site.full, Fault.READ_ONLY: site.read_only}
        if fault in by_the_server:
            return by_the_server[fault]()
        return site.proxy.faulty(fault)

    @property
    def site(self) -> Site:
        return self._site("large")

    @property
    def small_site(self) -> Site:
        return self._site("small")

    def _find(self, tmp: Path, key: StorageKey) -> tuple[redis.Redis, str]:
        """The node that holds a value, and the value's name there."""
        name = behind.name_of(_namespace(tmp), key)
        return (self.small_site if tmp in self._small else self.site).client_of(name), name

    def _site(self, name: str) -> Site:
        if name not in self._sites:
            self._sites[name] = self._make_site(self._settings)
        return self._sites[name]


class RepeatingHarness(SiteHarness):
    """For a site whose backend is certified elsewhere: what is new here shows without so many tries."""

    rounds = 40
    interruptions = 30
    examples = 8
    crash_points = 8
    measurements = 3
    slack_s = 10.0


def _namespace(tmp: Path) -> str:
    return NAMESPACES + hashlib.blake2b(str(tmp).encode(), digest_size=8).hexdigest()
