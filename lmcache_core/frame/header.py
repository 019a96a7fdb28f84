"""The frame header: its fields, its rules, and its one canonical encoding.

All integers are little-endian. A header is n x 4096 bytes, n as small as its content allows:

    0   8s   magic "lmcframe"
    8   u16  version (1)
    10  u16  kind
    12  u32  n
    16  u64  first_token
    24  u32  num_tokens
    28  u16  number of segments
    30  u16  number of codecs
    32       key, parent ("" for none), part, content_format, key_id, then the codecs: each u16 length, ASCII
    ...      one entry a segment: u64 stored_nbytes, u64 raw_nbytes, u64 checksum of the stored bytes
    ...      zeros
    -8  u64  XXH3-64 of everything before
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from enum import IntEnum

import xxhash

from lmcache_core.errors import Corrupt
from lmcache_core.frame.checksum import PAGE_NBYTES, padded_nbytes
from lmcache_core.identity.keys import KEY_PATTERN, PART_DIGEST_CHARS, StorageKey

FRAME_VERSION = 1

MAX_SEGMENTS = 4096
MAX_CODECS = 8
MAX_TEXT_CHARS = 128
MAX_TOKENS = 2**31 - 1
MAX_FIRST_TOKEN = 2**48
MAX_SEGMENT_NBYTES = 2**40

_MAGIC = b"lmcframe"
_FIXED = struct.Struct("<8sHHIQIHH")
_LENGTH = struct.Struct("<H")
_SEGMENT = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")

_PART = re.compile(rf"[0-9a-f]{{{PART_DIGEST_CHARS}}}")
_TEXT = re.compile(rf"[ -~]{{0,{MAX_TEXT_CHARS}}}")


class FrameKind(IntEnum):
    """What a frame holds."""

    CHUNK = 1
    """KV of one part of one chunk, one segment a layer."""
    RECORD = 2
    """A model record."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer's range of a frame: bytes as they lie in it, bytes after decoding, checksum of the former.

    The checksum covers the stored bytes and the zeros that pad them to whole pages.
    """

    stored_nbytes: int
    raw_nbytes: int
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """What a frame says about itself. A value that exists can be encoded.

    `part` is 16 hex digits for a chunk and "" for a record; `key_id` names the encryption key, if any.
    `segment_offsets` count from the start of the frame; they, `header_nbytes` and `frame_nbytes` are
    multiples of 4096.

    Raises:
        ValueError: a field breaks a rule of the format (the message names it).
    """

    kind: FrameKind
    key: StorageKey
    parent: StorageKey | None
    part: str
    content_format: str
    first_token: int
    num_tokens: int
    segments: tuple[Segment, ...]
    codecs: tuple[str, ...] = ()
    key_id: str = ""
    header_nbytes: int = field(init=False, repr=False, compare=False)
    segment_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    frame_nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_fields(self)
        content_nbytes = (
            _FIXED.size
            + sum(_LENGTH.size + len(text) for text in _texts(self))
            + _SEGMENT.size * len(self.segments)
            + _CHECKSUM.size
        )
        header_nbytes = offset = padded_nbytes(content_nbytes)
        offsets = []
        for segment in self.segments:
            offsets.append(offset)
            offset += padded_nbytes(segment.stored_nbytes)
        object.__setattr__(self, "header_nbytes", header_nbytes)
        object.__setattr__(self, "segment_offsets", tuple(offsets))
        object.__setattr__(self, "frame_nbytes", offset)


def encode_header(header: FrameHeader) -> bytes:
    """The one encoding of `header`: exactly `header.header_nbytes` bytes."""
    pieces = [
        _FIXED.pack(
            _MAGIC,
            FRAME_VERSION,
            header.kind,
            header.header_nbytes // PAGE_NBYTES,
            header.first_token,
            header.num_tokens,
            len(header.segments),
            len(header.codecs),
        )
    ]
    for text in _texts(header):
        pieces += (_LENGTH.pack(len(text)), text.encode("ascii"))
    pieces += [_SEGMENT.pack(s.stored_nbytes, s.raw_nbytes, s.checksum) for s in header.segments]
    body = b"".join(pieces).ljust(header.header_nbytes - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_header(memory: memoryview) -> FrameHeader:
    """The header at the start of `memory`, which may go on after it. Flat bytes; copies at most the header.

    Accepts exactly what `encode_header` writes: `encode_header(parse_header(m))` is the bytes parsed.

    Raises:
        Corrupt: the bytes are anything else; no other exception, whatever they are.
    """
    if len(memory) < PAGE_NBYTES:
        raise Corrupt(f"{len(memory)} bytes are too short for a frame header")
    magic, version, kind, pages, first_token, num_tokens, num_segments, num_codecs = _FIXED.unpack_from(
        memory
    )
    if magic != _MAGIC:
        raise Corrupt("not a frame: wrong magic")
    if version != FRAME_VERSION:
        raise Corrupt(f"frame version {version}, this release reads {FRAME_VERSION}")
    if num_codecs > MAX_CODECS:
        raise Corrupt(f"{num_codecs} codecs are over the limit of {MAX_CODECS}")
    if not 1 <= pages <= _MAX_HEADER_PAGES or len(memory) < pages * PAGE_NBYTES:
        raise Corrupt(f"a header of {pages} pages does not fit in {len(memory)} bytes or is over the limit")
    header_nbytes = pages * PAGE_NBYTES
    body = bytes(memory[: header_nbytes - _CHECKSUM.size])
    (checksum,) = _CHECKSUM.unpack_from(memory, len(body))
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise Corrupt("header checksum mismatch")
    texts, offset = _parse_texts(body, _FIXED.size, 5 + num_codecs)
    end = offset + num_segments * _SEGMENT.size
    if end > len(body):
        raise Corrupt("segment table runs past the header")
    try:
        key, parent, part, content_format, key_id, *codecs = texts
        header = FrameHeader(
            kind=FrameKind(kind),
            key=StorageKey(key),
            parent=StorageKey(parent) if parent else None,
            part=part,
            content_format=content_format,
            first_token=first_token,
            num_tokens=num_tokens,
            segments=tuple([Segment(*entry) for entry in _SEGMENT.iter_unpack(body[offset:end])]),
            codecs=tuple(codecs),
            key_id=key_id,
        )
    except ValueError as error:
        raise Corrupt(f"invalid header: {error}") from error
    # One value has one encoding: all that is left to differ is the length and the padding.
    if header.header_nbytes != header_nbytes or body[end:] != bytes(len(body) - end):
        raise Corrupt("header is longer than its content, or its padding is not zero")
    return header


def _parse_texts(body: bytes, offset: int, count: int) -> tuple[list[str], int]:
    """The texts and where they end: within the first page, as `count` and each length are limited."""
    texts = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(body, offset)
        if length > MAX_TEXT_CHARS:
            raise Corrupt(f"a text field of {length} bytes is over the limit of {MAX_TEXT_CHARS}")
        start = offset + _LENGTH.size
        offset = start + length
        try:
            texts.append(body[start:offset].decode("ascii"))
        except UnicodeDecodeError as error:
            raise Corrupt("a text field is not ASCII") from error
    return texts, offset


def _texts(header: FrameHeader) -> tuple[str, ...]:
    return (
        header.key,
        header.parent or "",
        header.part,
        header.content_format,
        header.key_id,
        *header.codecs,
    )


def _check_fields(header: FrameHeader) -> None:
    if not isinstance(header.kind, FrameKind):
        raise ValueError(f"kind {header.kind!r} is not a FrameKind")
    if not KEY_PATTERN.fullmatch(header.key):
        raise ValueError("key is not a storage key")
    if header.parent is not None and not KEY_PATTERN.fullmatch(header.parent):
        raise ValueError("parent is not a storage key")
    if header.kind is FrameKind.CHUNK:
        if not _PART.fullmatch(header.part):
            raise ValueError(f"a chunk's part must be {PART_DIGEST_CHARS} hex digits")
        if not 1 <= header.num_tokens <= MAX_TOKENS or not 0 <= header.first_token <= MAX_FIRST_TOKEN:
            raise ValueError(f"tokens {header.first_token} + {header.num_tokens} are out of range")
    elif header.part or header.num_tokens or header.first_token:
        raise ValueError("a record has no part and no tokens")
    if not all(_TEXT.fullmatch(text) for text in (header.content_format, header.key_id)):
        raise ValueError(
            f"content_format and key_id must be at most {MAX_TEXT_CHARS} printable ASCII characters"
        )
    if len(header.codecs) > MAX_CODECS or not all(c and _TEXT.fullmatch(c) for c in header.codecs):
        raise ValueError(f"codecs must be at most {MAX_CODECS} names of 1 to {MAX_TEXT_CHARS} characters")
    if not 1 <= len(header.segments) <= MAX_SEGMENTS:
        raise ValueError(f"{len(header.segments)} segments, allowed are 1 to {MAX_SEGMENTS}")
    for stored in header.segments:
        if not (
            1 <= stored.stored_nbytes <= MAX_SEGMENT_NBYTES and 1 <= stored.raw_nbytes <= MAX_SEGMENT_NBYTES
        ):
            raise ValueError(f"a segment's length must be 1 to {MAX_SEGMENT_NBYTES} bytes: {stored}")
        if not 0 <= stored.checksum < 2**64:
            raise ValueError(f"a checksum must have 64 bits: {stored}")
        if not header.codecs and stored.stored_nbytes != stored.raw_nbytes:
            raise ValueError(f"without a codec stored and raw lengths must be equal: {stored}")


_MAX_HEADER_PAGES = (
    padded_nbytes(
        _FIXED.size
        + (5 + MAX_CODECS) * (_LENGTH.size + MAX_TEXT_CHARS)
        + MAX_SEGMENTS * _SEGMENT.size
        + _CHECKSUM.size
    )
    // PAGE_NBYTES
)
