"""Small questions about many values, all of them in one round trip."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.sdk import Outcome, Status
from lmcache_core_redis.batch import Batch
from lmcache_core_redis.layout import META, Meta
from lmcache_core_redis.link import Link
from lmcache_core_redis.reading import MISS
from lmcache_core_redis.resp import Command, Reply, ServerError


def stat(link: Link, indexes: Sequence[int], batch: Batch) -> None:
    """Settles as OK the values that have a description and as many pieces as it says."""
    commands: list[Command] = []
    for index in indexes:
        name = batch.names[index]
        commands += ((b"HGET", name, META), (b"HLEN", name))
    link.send(commands)
    replies = link.replies(len(commands))
    found: dict[int, Outcome] = {}  # values have few lengths
    for index, described, count in zip(indexes, replies[::2], replies[1::2], strict=True):
        error = described if isinstance(described, ServerError) else count
        if isinstance(error, ServerError):
            _settle_error(link, index, error, batch, "stat")
        else:
            meta = sound(described, count)
            if meta is None:
                batch.done(index, MISS)
                continue
            outcome = found.get(meta.nbytes) or Outcome(status=Status.OK, nbytes=meta.nbytes)
            batch.done(index, found.setdefault(meta.nbytes, outcome))


def delete(link: Link, indexes: Sequence[int], batch: Batch) -> None:
    """The server frees the memory in the background."""
    link.send([(b"UNLINK", batch.names[index]) for index in indexes])
    for index, reply in zip(indexes, link.replies(len(indexes)), strict=True):
        if isinstance(reply, ServerError):
            _settle_error(link, index, reply, batch, "delete")
        else:
            batch.done(index, Outcome(status=Status.OK) if reply == 1 else MISS)


def sound(described: Reply, count: Reply) -> Meta | None:
    """The description of a value whose pieces are all there."""
    meta = Meta.decode(described) if isinstance(described, bytes) else None
    return meta if meta is not None and count == meta.num_pieces + 1 else None


def _settle_error(link: Link, index: int, error: ServerError, batch: Batch, op: str) -> None:
    if not batch.redirected(index, error, link.node):
        batch.done(index, link.where.outcome(error, op))
