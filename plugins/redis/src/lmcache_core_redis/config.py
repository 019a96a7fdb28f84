"""The options of the redis backend, with every default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_core.sdk import ALIGNMENT, ByteSize, Duration, Secret
from lmcache_core_redis.layout import LARGEST_PIECE, LEAST_PIECE
from lmcache_core_redis.node import Servers, parse_url

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFAULT_PIECE = ByteSize(4 * 1024 * 1024 - ALIGNMENT)
"""With its version just below 4 MiB, where the server's allocator has a size class."""
_LEAST_TTL = Duration("1s")


class RedisConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Redis or Valkey server, cluster or Sentinel group, and how values are kept there."""

    url: Annotated[
        str,
        Meta(
            description="`redis://host:6379/0`, `rediss://…` (TLS) or `unix:///path`. Several hosts are "
            "parted by commas."
        ),
    ]
    username: Annotated[
        str | None, Meta(description="The ACL user; without it the server's `default` user.")
    ] = None
    password: Annotated[Secret | None, Meta(description="The user's password. Nothing shows it.")] = None
    tls_ca: Annotated[
        Path | None,
        Meta(
            description="File of the authorities that may have signed the server's certificate; without it "
            "the system's."
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, Meta(description="File of this client's certificate, where the server asks for one.")
    ] = None
    tls_key: Annotated[Path | None, Meta(description="File of that certificate's private key.")] = None
    cluster: Annotated[
        bool, Meta(description="The hosts are nodes of a cluster; the others are found through them.")
    ] = False
    sentinel: Annotated[
        str | None,
        Meta(description="The hosts are Sentinels, and this is the name by which they know the primary."),
    ] = None
    sentinel_username: Annotated[
        str | None, Meta(description="The ACL user at the Sentinels, where they have users.")
    ] = None
    sentinel_password: Annotated[Secret | None, Meta(description="The password at the Sentinels.")] = None
    namespace: Annotated[
        str,
        Meta(
            description="Begins every key. Letters, digits, `_` and `-`. Engines with the same one "
            "share values."
        ),
    ] = "lmcache"
    ttl: Annotated[
        Duration | None,
        Meta(
            description="Values expire this long after they were stored; without it they stay until the "
            "server evicts them."
        ),
    ] = None
    pin: Annotated[
        bool,
        Meta(
            description="Offer pins. Needs `ttl` and a server whose `maxmemory-policy` is `volatile-…`; not "
            "in a cluster."
        ),
    ] = False
    piece_bytes: Annotated[
        ByteSize,
        Meta(description="Longer values are stored in pieces of this many bytes, a multiple of 4096."),
    ] = DEFAULT_PIECE
    max_in_flight: Annotated[
        int, Meta(ge=1, le=256, description="Calls under way at once, each with a connection of its own.")
    ] = 4

    def __post_init__(self) -> None:
        servers = parse_url(self.url)
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError("namespace: use 1 to 64 letters, digits, '_' and '-'")
        if self.piece_bytes % ALIGNMENT or not LEAST_PIECE <= self.piece_bytes <= LARGEST_PIECE:
            raise ValueError(f"piece_bytes: must be a multiple of 4096 from {LEAST_PIECE} to {LARGEST_PIECE}")
        if self.ttl is not None and self.ttl < _LEAST_TTL:
            raise ValueError(f"ttl: {self.ttl} can't work; set at least {_LEAST_TTL}")
        self._check_kind(servers)
        self._check_credentials(servers)

    def _check_kind(self, servers: Servers) -> None:
        if self.cluster and self.sentinel is not None:
            raise ValueError("cluster: a cluster has no Sentinels; set `cluster` or `sentinel`, not both")
        if not self.cluster and self.sentinel is None and len(servers.nodes) > 1:
            raise ValueError("url: several hosts need `cluster: true` or `sentinel: NAME`")
        if (self.cluster or self.sentinel is not None) and servers.nodes[0].path:
            raise ValueError("url: a unix socket leads to one server, not to a cluster or Sentinels")
        if self.cluster and servers.db:
            raise ValueError("url: a cluster has database 0 alone")
        if self.pin and self.cluster:
            raise ValueError("pin: pins are not offered in a cluster")
        if self.pin and self.ttl is None:
            raise ValueError("pin: set `ttl` too; a pin keeps a value from expiring and being evicted")

    def _check_credentials(self, servers: Servers) -> None:
        if self.username is not None and self.password is None:
            raise ValueError("username: set `password` too")
        if self.sentinel is None and (self.sentinel_username or self.sentinel_password):
            raise ValueError("sentinel_password: is used with `sentinel` only")
        if not servers.tls and (self.tls_ca or self.tls_cert or self.tls_key):
            raise ValueError("url: TLS files are set, so it must begin with rediss://")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert: set `tls_cert` and `tls_key` both, or neither")
