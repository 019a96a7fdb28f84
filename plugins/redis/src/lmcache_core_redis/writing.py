"""Putting values: whole or not at all, and in place of what was there at one stroke.

A short value is written by a transaction, during which the server serves nobody else. A longer one goes
piece by piece into a temporary hash, which expires if nobody finishes it, and a script renames that over the
value once it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmcache_core.sdk import BackendError, Item, Outcome, Status
from lmcache_core_redis.batch import Batch
from lmcache_core_redis.layout import META, VERSION_NBYTES, Meta, Names, field
from lmcache_core_redis.link import Link
from lmcache_core_redis.memory import Memory
from lmcache_core_redis.pins import STAY_IF_PINNED
from lmcache_core_redis.resp import Command, Reply, ServerError

COMMIT = b"""
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then
  redis.call('UNLINK', KEYS[1])
  return 0
end
redis.call('UNLINK', KEYS[2])
redis.call('RENAME', KEYS[1], KEYS[2])
if ARGV[2] == '' or KEYS[3] and redis.call('ZSCORE', KEYS[3], KEYS[2]) then
  redis.call('PERSIST', KEYS[2])
else
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
return 1
"""
"""Puts a complete temporary hash in the place of the value, whose pin stays: 1, or 0 if it is incomplete."""
_MOST_IN_TRANSACTION = 2
"""Pieces: the server copies them in one go, in which it takes no other command."""
_LEFTOVER_MS = b"%d" % (10 * 60 * 1000)
"""How long what a dead writer left behind stays; far longer than any put may take."""


class Writer:
    """How values of a namespace are put."""

    def __init__(self, names: Names, piece_nbytes: int, ttl_s: float | None, *, keeps_pins: bool) -> None:
        self._names = names
        self._piece_nbytes = piece_nbytes
        self._ttl_ms = b"%d" % round(ttl_s * 1000) if ttl_s is not None else b""
        self._keeps_pins = keeps_pins

    def put(self, link: Link, items: Sequence[Item], indexes: Sequence[int], batch: Batch) -> None:
        """Stores the items, the next one on its way while the answer about the last one is awaited."""
        sent: _Sent | None = None
        for index in indexes:
            item = items[index]
            if item.nbytes == 0:
                batch.fail([index], BackendError("an empty value can't be stored"))
                continue
            meta = Meta.of(os.urandom(VERSION_NBYTES), item.nbytes, self._piece_nbytes, item.parent)
            before, sent = sent, _Sent(index, item.nbytes, self._send(link, item, batch.names[index], meta))
            if before is not None:
                _settle(link, before, batch)
        if sent is not None:
            _settle(link, sent, batch)

    def _send(self, link: Link, item: Item, name: bytes, meta: Meta) -> int:
        """Sends a put, lets go of the item's memory, and returns the number of replies to come."""
        commands = list(self._commands(item, name, meta))
        link.send(commands)
        return len(commands)

    def _commands(self, item: Item, name: bytes, meta: Meta) -> Iterator[Command]:
        memory = Memory(item.views)
        in_transaction = meta.num_pieces <= _MOST_IN_TRANSACTION
        target = name if in_transaction else self._names.temporary(item.key, meta.version)
        described: Command = (b"HSET", target, META, meta.encode())
        pieces: list[Command] = [
            (b"HSET", target, field(index), (meta.version, *memory.part(*meta.piece(index))))
            for index in range(meta.num_pieces)
        ]
        if in_transaction:
            yield from ((b"MULTI",), (b"UNLINK", name), described, *pieces)
            if self._ttl_ms:  # before what may fail: a value that never expires would never be evicted
                yield (b"PEXPIRE", name, self._ttl_ms)
            if self._keeps_pins:
                yield (b"EVAL", STAY_IF_PINNED, b"2", name, self._names.pins)
            yield (b"EXEC",)
            return
        for command in (described, *pieces):  # each may begin it anew, where the server has lost what came
            yield from (command, (b"PEXPIRE", target, _LEFTOVER_MS))
        complete = b"%d" % (meta.num_pieces + 1)
        keys = (target, name, self._names.pins) if self._keeps_pins else (target, name)
        yield (b"EVAL", COMMIT, b"%d" % len(keys), *keys, complete, self._ttl_ms)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A put whose replies are due."""

    index: int
    nbytes: int
    num_replies: int


def _settle(link: Link, sent: _Sent, batch: Batch) -> None:
    replies = link.replies(sent.num_replies)
    error = _first_error(replies)
    if error is not None:
        if not batch.redirected(sent.index, error, link.node):
            batch.done(sent.index, link.where.outcome(error, "put"))
    elif replies[-1] == 0:  # the server evicted what was there before the rest came
        batch.done(sent.index, Outcome(status=Status.FULL))
    else:
        batch.done(sent.index, Outcome(status=Status.OK, nbytes=sent.nbytes))


def _first_error(replies: Sequence[Reply]) -> ServerError | None:
    for reply in replies:
        if isinstance(reply, ServerError):
            return reply
        if isinstance(reply, list) and (error := _first_error(reply)) is not None:
            return error
    return None
