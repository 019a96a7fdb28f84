"""Listing what is stored, a page at a time, by SCAN: no server is ever blocked by it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.exceptions import InvalidResponse

from lmcache_core.sdk import BackendUnavailable, Call, Entry, Page, StorageKey
from lmcache_core_redis.asking import sound
from lmcache_core_redis.layout import META, Names
from lmcache_core_redis.link import Link
from lmcache_core_redis.links import Links
from lmcache_core_redis.resp import Command, ServerError
from lmcache_core_redis.routes import Routes

_LEAST_COUNT, _MOST_COUNT = 10, 1000
"""Keys that one SCAN looks at. A thousand take under a millisecond of the server's time."""
_SHARE = 0.2
"""How much of the call's time is spent on looking for names before a page is returned as it is."""
_GLOB = re.compile(r"([*?\[\]\\^])")


@dataclass(slots=True)
class _Position:
    """Where a scan stands: at a server, at SCAN's own cursor there (None: its end), with keys left over."""

    node: str
    cursor: str | None = "0"
    left: list[StorageKey] = field(default_factory=list)

    def encode(self) -> str:
        return json.dumps([self.node, self.cursor, self.left])

    @classmethod
    def decode(cls, text: str) -> _Position:
        return cls(*json.loads(text))


def scan(
    routes: Routes, links: Links, names: Names, call: Call, prefix: str, cursor: str | None, limit: int
) -> Page:
    """A page of entries. It may hold few or none although more follow.

    Raises:
        BackendError: a server failed, or the cluster's servers are others than before.
    """
    nodes = {str(node): node for node in sorted(routes.nodes(call), key=str)}
    at = _Position.decode(cursor) if cursor is not None else _Position(next(iter(nodes)))
    if at.node not in nodes:
        raise BackendUnavailable("the servers changed during the scan; begin it again")
    with links.to(nodes[at.node], call) as link:
        entries = _entries(link, names, _keys(link, names, call, prefix, at, limit))
    if at.cursor is None and not at.left:
        following = [name for name in nodes if name > at.node]
        return Page(entries=entries, cursor=_Position(following[0]).encode() if following else None)
    return Page(entries=entries, cursor=at.encode())


def _keys(link: Link, names: Names, call: Call, prefix: str, at: _Position, limit: int) -> list[StorageKey]:
    """Up to `limit` keys from `at` on, which moves."""
    pattern = names.value(StorageKey(_GLOB.sub(r"\\\1", prefix))).removesuffix(b"}") + b"*"
    enough = call.remaining() * (1 - _SHARE)
    found = dict.fromkeys(at.left)
    while len(found) < limit and at.cursor is not None and call.remaining() > enough:
        count = b"%d" % min(max(limit, _LEAST_COUNT), _MOST_COUNT)
        link.send([(b"SCAN", at.cursor.encode(), b"MATCH", pattern, b"COUNT", count)])
        match link.reply():
            case ServerError() as error:
                raise link.where.of_server(error)
            case [bytes(cursor), list(texts)]:
                at.cursor = None if cursor == b"0" else cursor.decode()
                for text in texts:
                    key = names.key_of(text) if isinstance(text, bytes) else None
                    if key is not None:
                        found[key] = None
            case reply:
                raise InvalidResponse(f"not an answer to SCAN: {str(reply)[:40]}")
    keys = list(found)
    at.left = keys[limit:]
    return keys[:limit]


def _entries(link: Link, names: Names, keys: Sequence[StorageKey]) -> list[Entry]:
    """What the values are that can be read; one that has gone meanwhile isn't among them."""
    commands: list[Command] = []
    for key in keys:
        commands += ((b"HGET", names.value(key), META), (b"HLEN", names.value(key)))
    link.send(commands)
    entries = []
    replies = link.replies(len(commands))
    for key, described, count in zip(keys, replies[::2], replies[1::2], strict=True):
        if (meta := sound(described, count)) is not None:
            entries.append(Entry(key=key, nbytes=meta.nbytes, parent=meta.parent))
    return entries
