"""One value being read: what to ask for, where it goes, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.sdk import Item, Outcome, Status
from lmcache_core_redis.layout import VERSION_NBYTES, Meta
from lmcache_core_redis.memory import Memory, Scratch
from lmcache_core_redis.resp import Reply, ServerError

MISS = Outcome(status=Status.MISS)


class Reading:
    """An item of a get. Holds the item's memory until it is closed."""

    def __init__(self, index: int, item: Item, name: bytes, scratch: Scratch) -> None:
        self.index = index
        self.item = item
        self.name = name
        self.meta: Meta | None = None
        self.error: ServerError | None = None
        self.answered = False  # the description came, or the answer that there is none
        self._memory: Memory | None = Memory(item.views)
        self._scratch = scratch
        self._version = bytearray(VERSION_NBYTES)
        self._missing: set[int] = set()  # the pieces that are wanted and haven't come

    def describe(self, reply: Reply) -> None:
        """Takes the answer about field `m`. What was read before it is void."""
        self.answered, self.meta, self.error = True, None, None
        if isinstance(reply, ServerError):
            self.error = reply
        elif isinstance(reply, bytes):
            self.meta = Meta.decode(reply)
        self._missing = set(self.wanted(self.meta)) if self.meta is not None else set()

    def wanted(self, meta: Meta) -> range:
        """The pieces of a value described by `meta` that the item needs."""
        item = self.item
        if item.whole:
            return range(meta.num_pieces if meta.nbytes <= item.nbytes else 0)
        if item.offset + item.nbytes > meta.nbytes or item.nbytes == 0:
            return range(0)
        last = (item.offset + item.nbytes - 1) // meta.piece_nbytes
        return range(item.offset // meta.piece_nbytes, last + 1)

    def place(self, piece: int, nbytes: int) -> Sequence[memoryview]:
        """Where `nbytes` that came as piece `piece` go; to nowhere where they can't be what is wanted."""
        if self.meta is None or piece not in self._missing or self._memory is None:
            return self._scratch.of(nbytes)
        start, length = self.meta.piece(piece)
        if nbytes != VERSION_NBYTES + length:
            return self._scratch.of(nbytes)
        first = max(start, self.item.offset)
        end = min(start + length, self.item.offset + self.item.nbytes)
        return [
            memoryview(self._version),
            *self._scratch.of(first - start),
            *self._memory.part(first - self.item.offset, end - first),
            *self._scratch.of(start + length - end),
        ]

    def received(self, piece: int, answer: int | ServerError | None) -> None:
        """Takes the answer about a piece, whose bytes have been placed."""
        if isinstance(answer, ServerError):
            self.error = self.error or answer
        elif self.meta is not None and piece in self._missing and answer is not None:
            whole = answer == VERSION_NBYTES + self.meta.piece(piece)[1]
            if whole and self._version == self.meta.version:
                self._missing.discard(piece)

    @property
    def torn(self) -> bool:
        """Some pieces didn't come, or are of another put."""
        return bool(self._missing)

    def outcome(self) -> Outcome:
        """How the item ended, where the server answered no error. Lets go of the memory."""
        self._memory = None
        meta, item = self.meta, self.item
        if meta is None or self.torn:
            return MISS
        if item.whole:
            fits = meta.nbytes <= item.nbytes
            return Outcome(status=Status.OK if fits else Status.TOO_SMALL, nbytes=meta.nbytes)
        if item.offset + item.nbytes > meta.nbytes:
            return MISS
        return Outcome(status=Status.OK, nbytes=item.nbytes)
