"""Proving access when a tier opens: what will be done later is done once, with a key of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from lmcache_core.sdk import Capabilities, StorageKey
from lmcache_core_redis.layout import META, Names, field
from lmcache_core_redis.link import Link
from lmcache_core_redis.resp import Command, Reply, ServerError
from lmcache_core_redis.writing import COMMIT

log = logging.getLogger(__name__)

_LEFTOVER_MS = b"60000"


def probe_key() -> StorageKey:
    return StorageKey(f"open-{os.urandom(16).hex()}")


def prove_access(
    link: Link, names: Names, key: StorageKey, offered: Capabilities, *, cluster: bool
) -> Capabilities:
    """Does with `key` what values need, and returns what of `offered` the user may do.

    Raises:
        BackendError: values can't be kept there (now).
    """
    temporary, name, elsewhere = names.temporary(key, b"probe"), names.value(key), names.value(probe_key())
    commands: list[Command] = [
        (b"HSET", temporary, META, b"probe"),
        (b"PEXPIRE", temporary, _LEFTOVER_MS),
        (b"EVAL", COMMIT, b"2", temporary, name, b"1", _LEFTOVER_MS),
        (b"HGET", name, META),
        (b"HLEN", name),
        (b"HMGET", name, META, field(0)),
        (b"MULTI",),
        (b"UNLINK", name),
        (b"EXEC",),
        (b"SCAN", b"0", b"MATCH", name, b"COUNT", b"1"),
    ]
    if not cluster:
        commands.insert(0, (b"UNLINK", name, elsewhere))  # a cluster's node refuses: they are in two slots
    link.send(commands)
    *needed, scanned = [link.reply() for _ in commands]
    for reply in needed:
        # Full is no reason not to read. It ends a transaction, which then says so of itself, too.
        if isinstance(reply, ServerError) and reply.code not in ("OOM", "EXECABORT"):
            raise link.where.of_server(reply)
    if isinstance(scanned, ServerError):
        log.warning("%s", link.where.of_server(scanned))
        return replace(offered, scan=False)
    return offered


def can_pin(link: Link) -> bool:
    """Whether the server evicts only what can expire. Where it doesn't say so, it can't be relied on."""
    link.send([(b"INFO", b"memory")])
    reply: Reply = link.reply()
    policy = b""
    if isinstance(reply, bytes):
        policy = next((line for line in reply.split() if line.startswith(b"maxmemory_policy:")), b"")
    if policy.partition(b":")[2].startswith((b"volatile-", b"noeviction")):
        return True
    told = policy.decode(errors="replace") or "its maxmemory_policy can't be read (INFO)"
    log.warning("redis server %s: no pins are offered, because %s; set volatile-lru", link.node, told)
    return False
