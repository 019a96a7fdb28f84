"""Content by its hashes alone: what one process tells another about a request."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.identity.content import Content, Extra
from lmcache_core.identity.model import ModelRecord
from lmcache_core.identity.tokens import Tokens


class NamedContent(Content):
    """A prefix of a request as its chunks' hashes and those of tails after them, without tokens or salt.

    It can be stored, looked up and retrieved like the content it was taken from, but doesn't grow.
    """

    __slots__ = ("_tails",)

    def __init__(
        self, model: ModelRecord, hashes: Sequence[bytes], tails: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        self._start(model, b"", b"", None)
        self.root = b""  # not known here, nor needed: the hashes hang on it
        self._hashes = list(hashes)
        self._tails = list(tails)  # (number of tokens, hash), longest first
        self._num_tokens = len(self._hashes) * model.chunk_tokens + (tails[0][0] if tails else 0)

    @classmethod
    def of(cls, content: Content, num_tokens: int) -> NamedContent:
        """The first `num_tokens` tokens of `content`.

        Raises:
            ValueError: no name ends there: `content` is shorter, or it is no multiple of 16 tokens.
        """
        num_chunks, rest = divmod(num_tokens, content.model.chunk_tokens)
        hashes = content.hashes[:num_chunks]
        tails: list[tuple[int, bytes]] = []
        if rest and len(hashes) == num_chunks:
            tails = [tail for tail in content.tail_hashes_after(num_chunks) if tail[0] == rest]
        if len(hashes) < num_chunks or (rest and not tails):
            raise ValueError(f"no name of a content of {content.num_tokens} tokens ends at {num_tokens}")
        return cls(content.model, hashes, tails)

    @classmethod
    def whole(cls, content: Content) -> NamedContent:
        """All whole chunks of `content`, and all tails after them."""
        return cls(content.model, content.hashes, content.tail_hashes_after(content.num_chunks))

    @property
    def tokens(self) -> memoryview:
        raise TypeError("content known by its hashes has no tokens")

    def extend(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> None:
        raise TypeError("content known by its hashes does not grow")

    def tail_hashes_after(self, num_chunks: int) -> list[tuple[int, bytes]]:
        if not 0 <= num_chunks <= self.num_chunks:
            raise IndexError(f"{num_chunks} whole chunks of {self.num_chunks}")
        return list(self._tails) if num_chunks == self.num_chunks else []

    def __reduce__(self) -> tuple[object, ...]:
        return (NamedContent, (self.model, tuple(self._hashes), tuple(self._tails)))
