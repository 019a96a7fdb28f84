"""Getting values: pieces straight into the caller's memory, a few on their way at any moment.

The first pass asks for a value's description and its pieces one by one. Where a put came between them,
their versions differ, and a second pass asks for all at once, which the server answers from one moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from redis.exceptions import InvalidResponse

from lmcache_core.sdk import Item
from lmcache_core_redis.batch import Batch
from lmcache_core_redis.layout import META, Meta, field
from lmcache_core_redis.link import Link
from lmcache_core_redis.memory import Scratch
from lmcache_core_redis.reading import Reading
from lmcache_core_redis.resp import Command, ServerError

_WINDOW_NBYTES = 8 << 20
_WINDOW_REQUESTS = 512


class _Request(NamedTuple):
    """A field of a value that was asked for, and roughly how long it may be; no field: that was all."""

    reading: Reading
    field: bytes | None
    piece: int = 0
    nbytes: int = 0


class Getter:
    """How values are got; `piece_nbytes` is how long their pieces most likely are."""

    def __init__(self, piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes

    def get(self, link: Link, items: Sequence[Item], indexes: Sequence[int], batch: Batch) -> None:
        scratch = Scratch()
        torn = []
        readings = (Reading(index, items[index], batch.names[index], scratch) for index in indexes)
        for reading in self._first_pass(link, readings):
            if reading.torn and reading.error is None:
                torn.append(reading)
            else:
                _settle(reading, link, batch)
        for reading in torn:
            _read_at_once(link, reading)
            _settle(reading, link, batch)

    def _first_pass(self, link: Link, readings: Iterable[Reading]) -> Iterator[Reading]:
        """Yields each reading when what was asked for it has come."""
        requests = self._requests(readings)
        due: deque[_Request] = deque()
        due_nbytes, more = 0, True
        while more or due:
            commands: list[Command] = []
            while more and due_nbytes < _WINDOW_NBYTES and len(due) < _WINDOW_REQUESTS:
                request = next(requests, None)
                if request is None:
                    more = False
                    break
                due.append(request)
                due_nbytes += request.nbytes
                if request.field is not None:
                    commands.append((b"HGET", request.reading.name, request.field))
            if commands:
                link.send(commands)
            if not due:
                return
            request = due.popleft()
            due_nbytes -= request.nbytes
            if request.field is None:
                yield request.reading
            else:
                _receive(link, request)

    def _requests(self, readings: Iterable[Reading]) -> Iterator[_Request]:
        """What is asked, in order. A value that isn't described yet is taken to be as long as its views."""
        for reading in readings:
            yield _Request(reading, META)
            item = reading.item
            guess = Meta.of(b"", item.offset + item.nbytes, self._piece_nbytes, None)
            asked = set()
            for piece in reading.wanted(guess):
                if reading.answered:
                    break
                asked.add(piece)
                yield _Request(reading, field(piece), piece, guess.piece(piece)[1])
            if (meta := reading.meta) is not None:
                for piece in reading.wanted(meta):
                    if piece not in asked:
                        yield _Request(reading, field(piece), piece, meta.piece(piece)[1])
            yield _Request(reading, None)


def _read_at_once(link: Link, reading: Reading) -> None:
    """Reads a value by one command; again only when it got more pieces since it was described."""
    while True:
        assert reading.meta is not None
        pieces = reading.wanted(reading.meta)
        link.send([(b"HMGET", reading.name, META, *map(field, pieces))])
        count = link.array()
        if isinstance(count, ServerError) or count is None:
            reading.describe(count)
            return
        if count != 1 + len(pieces):
            raise InvalidResponse(f"{count} answers to {1 + len(pieces)} questions")
        reading.describe(link.reply())
        for piece in pieces:
            reading.received(piece, link.bulk(partial(reading.place, piece)))
        if reading.meta is None or set(reading.wanted(reading.meta)) <= set(pieces):
            return


def _receive(link: Link, request: _Request) -> None:
    reading = request.reading
    if request.field == META:
        reading.describe(link.reply())
    else:
        reading.received(request.piece, link.bulk(partial(reading.place, request.piece)))


def _settle(reading: Reading, link: Link, batch: Batch) -> None:
    error, outcome = reading.error, reading.outcome()
    if error is None:
        batch.done(reading.index, outcome)
    elif not batch.redirected(reading.index, error, link.node):
        batch.done(reading.index, link.where.outcome(error, "get"))
