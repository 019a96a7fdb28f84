"""Store: from the host engine's KV to frames in the tiers, chunk by chunk or layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_core.engine.record import store_record
from lmcache_core.engine.results import KVSource, LayerSource, StoreResult
from lmcache_core.engine.shape import FrameShape
from lmcache_core.events import Event, Stored
from lmcache_core.identity import Content, ModelRecord, StorageKey
from lmcache_core.tiers import Frame, Marks, TierChain


@dataclass(frozen=True, slots=True)
class Piece:
    """One frame to store: a whole chunk, or the tail."""

    key: StorageKey
    parent: StorageKey
    first_token: int
    num_tokens: int


class _Request:
    """One store: its pieces, and what became of them."""

    def __init__(
        self, pieces: Sequence[Piece], path: Sequence[StorageKey], marks: Marks, wait_s: float
    ) -> None:
        self.pieces = pieces
        self.path = path
        self.marks = marks
        self.started = time.monotonic()
        self.deadline = self.started + wait_s
        self.new = self.known = self.skipped = self.nbytes = 0


class Storer:
    """The part of an engine that stores."""

    def __init__(
        self,
        chain: TierChain,
        model: ModelRecord,
        shape: FrameShape,
        emit: Callable[[Event], None],
        *,
        tails: bool,
        allocate_deadline_s: float,
    ) -> None:
        self._chain = chain
        self._model = model
        self._shape = shape
        self._emit = emit
        self._tails = tails
        self._allocate_deadline_s = allocate_deadline_s

    def store(self, content: Content, source: KVSource, skip: int) -> StoreResult:
        """See `CacheEngine.store`; `skip` tokens are left out."""
        request = self._request(content, skip)
        for position, piece in enumerate(request.pieces):
            taken = self._chain.once(piece.key, partial(self._store_one, source, piece, request))
            if not self._count(request, position, taken):
                break
        return self._end(request)

    def store_layers(
        self, content: Content, source: LayerSource, skip: int
    ) -> Generator[int, None, StoreResult]:
        """See `CacheEngine.store_layers`."""
        request = self._request(content, skip)
        frames: list[Frame | None] = []  # None: held already
        try:
            for piece in request.pieces:
                if self._chain.holds(piece.key):
                    frames.append(None)
                    continue
                frame = self._allocate(piece, request)
                if frame is None:
                    break
                frames.append(frame)
            num_layers = self._shape.part.num_layers
            for layer in range(num_layers):
                for piece, frame in zip(request.pieces, frames, strict=False):
                    if frame is not None:
                        source.gather_layer(layer, piece.first_token, piece.num_tokens, frame.segment(layer))
                if layer == num_layers - 1:
                    source.wait_gathered()
                    self._commit(request, frames)
                yield layer
            return self._end(request)
        finally:
            for frame in frames:
                if frame is not None:
                    frame.release()

    # -- inside ----------------------------------------------------------------------------------

    def _request(self, content: Content, skip: int) -> _Request:
        chunk_tokens, num_tokens = self._model.chunk_tokens, content.num_tokens
        keys = content.keys(self._shape.part)[: num_tokens // chunk_tokens]
        pieces = [
            Piece(keys[i], keys[i - 1] if i else self._model.key, i * chunk_tokens, chunk_tokens)
            for i in range(skip // chunk_tokens, len(keys))
        ]
        if self._tails and skip < num_tokens:
            parent = keys[-1] if keys else self._model.key
            tails = content.tails_after(self._shape.part, len(keys))
            named = [tail for tail in tails if tail.end <= num_tokens]
            pieces += [Piece(tail.key, parent, tail.first_token, tail.num_tokens) for tail in named[:1]]
        path = [self._model.key, *keys, *(piece.key for piece in pieces[-1:])]
        request = _Request(pieces, path, self._chain.mark(path), self._allocate_deadline_s)
        if self._chain.closed:  # nobody could load what is still held either
            request.pieces, request.skipped = (), sum(piece.num_tokens for piece in pieces)
        elif pieces:  # the model's record is the root of its chunks; it explains misses
            store_record(self._chain, self._model, request.marks, request.deadline)
        return request

    def _allocate(self, piece: Piece, request: _Request) -> Frame | None:
        header = self._shape.header(piece.key, piece.parent, piece.first_token, piece.num_tokens)
        return self._chain.allocate(header, request.deadline)

    def _store_one(self, source: KVSource, piece: Piece, request: _Request) -> bool:
        frame = self._allocate(piece, request)
        if frame is None:
            return False
        with frame:
            source.gather(piece.first_token, piece.num_tokens, frame.segments())
            return self._chain.put(frame, request.marks)

    def _commit(self, request: _Request, frames: Sequence[Frame | None]) -> None:
        """All layers are in: from here on the frames may be found."""
        for position, piece in enumerate(request.pieces):
            if position == len(frames):  # there was no memory for this one
                self._count(request, position, False)
                return
            frame = frames[position]
            taken = None
            if frame is not None:
                taken = self._chain.once(piece.key, partial(self._chain.put, frame, request.marks))
            if not self._count(request, position, taken):
                return

    def _count(self, request: _Request, position: int, taken: bool | None) -> bool:
        """Notes what became of a piece: stored, skipped (with all after it), or None: known before."""
        num_tokens = request.pieces[position].num_tokens
        if taken is None:
            request.known += num_tokens
        elif taken:
            request.new += num_tokens
            request.nbytes += self._shape.part.num_layers * self._shape.part.segment_nbytes(num_tokens)
        else:
            request.skipped = sum(piece.num_tokens for piece in request.pieces[position:])
            return False
        return True

    def _end(self, request: _Request) -> StoreResult:
        if request.new:
            self._chain.touch(request.path)
        self._emit(
            Stored(
                num_tokens=request.new,
                num_known_tokens=request.known,
                nbytes=request.nbytes,
                seconds=time.monotonic() - request.started,
            )
        )
        return StoreResult(
            num_tokens=request.new, num_known_tokens=request.known, num_skipped_tokens=request.skipped
        )
