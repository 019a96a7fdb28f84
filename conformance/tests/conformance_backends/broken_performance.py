"""Broken in how fast they are: each by far more than noise, so that no quiet machine is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from conformance_backends.catalogue import breaks
from conformance_backends.memory import MemoryBackend, write_at
from lmcache_core.storage.contract import Call, Outcome, View

T = TypeVar("T")
_PIECE = 32


@breaks("writing_keeps_up_with_the_bare_medium")
class WritesInTinyPieces(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        value = super().gather(views)
        return b"".join([value[start : start + _PIECE] for start in range(0, len(value), _PIECE)])


@breaks("reading_keeps_up_with_the_bare_medium")
class ReadsInTinyPieces(MemoryBackend):
    def spread(self, part: bytes, views: Sequence[View]) -> None:
        position = 0
        for view in views:
            end = min(view.nbytes, len(part) - position)
            for start in range(0, end, _PIECE):
                write_at(view.address + start, part[position + start : position + min(start + _PIECE, end)])
            position += end


@breaks("a_batch_is_as_fast_as_its_items_one_by_one")
class SearchesThroughTheBatchForEachItem(MemoryBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        sum(range(2000 * len(things) ** 2))
        super().each(things, call, one)
