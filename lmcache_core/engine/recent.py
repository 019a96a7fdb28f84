"""Requests given as bare tokens: the latest ones aren't hashed again."""

from __future__ import annotations

from collections import deque

from lmcache_core.identity import Content, ModelRecord, Tokens
from lmcache_core.identity.tokens import unchecked_bytes

REMEMBERED_REQUESTS = 8


class RecentContents:
    """Thread-safe: threads that ask for the same tokens at once may both hash them."""

    def __init__(self, model: ModelRecord) -> None:
        self._model = model
        self._remembered: deque[tuple[bytes, Content]] = deque(maxlen=REMEMBERED_REQUESTS)

    def of(self, tokens: Tokens) -> Content:
        raw = unchecked_bytes(tokens)  # what is remembered has been checked, and `extend` checks the rest
        for known, content in reversed(tuple(self._remembered)):
            if known == raw:
                return content
        content = Content(self._model)
        content.extend(memoryview(raw).cast("i"))
        self._remembered.append((raw, content))
        return content
