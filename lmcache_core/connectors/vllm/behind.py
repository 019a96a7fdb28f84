"""The rest of a request's content, behind tokens that the engine has itself."""

from __future__ import annotations

from lmcache_core.identity import Content, NamedContent


def behind(content: Content, num_tokens: int) -> Content:
    """What of `content` follows its first `num_tokens` tokens, whole chunks: to look up or bring near."""
    return Behind(content, num_tokens // content.model.chunk_tokens) if num_tokens else content


class Behind(NamedContent):
    """What follows the first `num_chunks` whole chunks of `content`, counted from there."""

    __slots__ = ("_content", "_num_before")

    def __init__(self, content: Content, num_chunks: int) -> None:
        super().__init__(content.model, content.hashes[num_chunks:])
        self._content = content
        self._num_before = num_chunks
        self._num_tokens = content.num_tokens - num_chunks * content.model.chunk_tokens

    def tail_hashes_after(self, num_chunks: int) -> list[tuple[int, bytes]]:
        return self._content.tail_hashes_after(self._num_before + num_chunks)
