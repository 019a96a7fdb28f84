"""The values the suite stores: every byte says which key, version, length and position it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lmcache_core.frame import FrameHeader, FrameKind, Segment, seal
from lmcache_core.identity.keys import StorageKey, chunk_key

PAGE = 4096
PART = "0123456789abcdef"


def key_named(name: str) -> StorageKey:
    """A key of the shape the core uses; different names give different keys."""
    return chunk_key(PART, hashlib.blake2b(name.encode(), digest_size=32).digest())


def value_of(key: StorageKey, version: int, nbytes: int) -> bytes:
    """The bytes of one version of one key.

    A stream that never repeats, so that a page of another key, version, length or position is seen.
    """
    return hashlib.shake_128(f"{key}/{version}/{nbytes}".encode()).digest(nbytes)


def sealed_frame(key: StorageKey, version: int, segment_nbytes: Sequence[int]) -> bytes:
    """A frame as the core writes it: header, then one segment a layer, under checksums."""
    header = FrameHeader(
        kind=FrameKind.CHUNK,
        key=key,
        parent=None,
        part=PART,
        content_format="kv float32 64",
        first_token=0,
        num_tokens=16,
        segments=tuple(Segment(nbytes, nbytes) for nbytes in segment_nbytes),
    )
    memory = bytearray(header.frame_nbytes)
    for offset, segment in zip(header.segment_offsets, header.segments, strict=True):
        memory[offset : offset + segment.stored_nbytes] = value_of(key, version, segment.stored_nbytes)
    seal(memoryview(memory), header)
    return bytes(memory)


def difference(expected: bytes, actual: bytes) -> str:
    """Where two values differ, for a message: the first wrong page and how many are wrong."""
    if len(expected) != len(actual):
        return f"{len(actual)} bytes instead of {len(expected)}"
    wrong = [
        start // PAGE
        for start in range(0, len(expected), PAGE)
        if expected[start : start + PAGE] != actual[start : start + PAGE]
    ]
    if not wrong:
        return "no difference"
    pages = (len(expected) + PAGE - 1) // PAGE
    return f"{len(wrong)} of {pages} pages differ, the first is page {wrong[0]}"
