"""Properties of frames: one encoding a value, no exception but Corrupt, every bit under a checksum."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.errors import Corrupt
from lmcache_core.frame import (
    FrameHeader,
    FrameKind,
    Segment,
    encode_header,
    parse_header,
    payload,
    seal,
    verify,
    verify_prefix,
)

keys = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=120)
parts = st.text("0123456789abcdef", min_size=16, max_size=16)
texts = st.text([chr(c) for c in range(32, 127)], max_size=128)
checksums = st.integers(0, 2**64 - 1)
plain_segments = st.builds(lambda n, checksum: Segment(n, n, checksum), st.integers(1, 2**40), checksums)
coded_segments = st.builds(Segment, st.integers(1, 2**40), st.integers(1, 2**40), checksums)


@st.composite
def headers(draw: st.DrawFn) -> FrameHeader:
    codecs = tuple(draw(st.lists(texts.filter(bool), max_size=8)))
    kind = draw(st.sampled_from(FrameKind))
    chunk = kind is FrameKind.CHUNK
    segments = draw(st.lists(coded_segments if codecs else plain_segments, min_size=1, max_size=300))
    return FrameHeader(
        kind=kind,
        key=draw(keys),
        parent=draw(st.none() | keys),
        part=draw(parts) if chunk else "",
        content_format=draw(texts),
        first_token=draw(st.integers(0, 2**48)) if chunk else 0,
        num_tokens=draw(st.integers(1, 2**31 - 1)) if chunk else 0,
        segments=tuple(segments),
        codecs=codecs,
        key_id=draw(texts),
    )


small_headers = st.builds(
    lambda key, part, lengths: FrameHeader(
        kind=FrameKind.CHUNK,
        key=key,
        parent=None,
        part=part,
        content_format="kv bfloat16 8",
        first_token=0,
        num_tokens=16,
        segments=tuple(Segment(n, n) for n in lengths),
    ),
    keys,
    parts,
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
)


def filled_frame(header: FrameHeader, seed: int) -> bytearray:
    frame = bytearray(header.frame_nbytes)
    for index, segment in enumerate(header.segments):
        block = xxhash.xxh3_128_digest(bytes([index]), seed)
        payload(memoryview(frame), header, index)[:] = (block * (segment.stored_nbytes // 16 + 1))[
            : segment.stored_nbytes
        ]
    seal(memoryview(frame), header)
    return frame


@given(headers())
@settings(max_examples=150, deadline=None)
def test_a_header_comes_back_from_its_encoding(header: FrameHeader) -> None:
    encoded = encode_header(header)
    assert len(encoded) == header.header_nbytes
    assert parse_header(memoryview(encoded)) == header


def survives(data: bytes) -> None:
    try:
        header = parse_header(memoryview(data))
    except Corrupt:
        return
    assert encode_header(header) == data[: header.header_nbytes]


@given(st.binary(max_size=200), st.integers(0, 9000))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_corrupt_or_canonical(start: bytes, nbytes: int) -> None:
    survives(start.ljust(nbytes, b"\0"))


@given(
    headers(),
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_changed_header_with_a_right_checksum_is_corrupt_or_canonical(
    header: FrameHeader, changes: list[tuple[int, int]], cut: bool
) -> None:
    """A hostile writer computes checksums too: the rules alone must hold."""
    data = bytearray(encode_header(header))
    for offset, value in changes:
        data[offset] = value
    (pages,) = struct.unpack_from("<I", data, 12)
    length = min(pages, 30) * 4096
    if cut and length:
        del data[length:]
        data.extend(bytes(length - len(data)))
    if len(data) >= 4096:
        struct.pack_into("<Q", data, len(data) - 8, xxhash.xxh3_64_intdigest(data[:-8]))
    survives(bytes(data))


@given(small_headers, st.integers(0, 2**32), st.data())
@settings(max_examples=100, deadline=None)
def test_one_flipped_bit_anywhere_fails_verification(
    header: FrameHeader, seed: int, data: st.DataObject
) -> None:
    frame = filled_frame(header, seed)
    view = memoryview(frame)
    verify(view, key=header.key, part=header.part)
    bits = data.draw(st.lists(st.integers(0, len(frame) * 8 - 1), min_size=8, max_size=8))
    for bit in bits:
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            verify(view, key=header.key, part=header.part)
        frame[bit // 8] ^= 1 << bit % 8
    verify(view, key=header.key, part=header.part)


def test_one_flipped_bit_in_every_byte_of_a_frame_fails_verification() -> None:
    header = FrameHeader(
        kind=FrameKind.CHUNK,
        key="c-1",
        parent=None,
        part="0" * 16,
        content_format="kv float16 8",
        first_token=0,
        num_tokens=1,
        segments=(Segment(4000, 4000), Segment(100, 100)),
    )
    frame = filled_frame(header, seed=1)
    for position in range(len(frame)):
        frame[position] ^= 1 << position % 8
        with pytest.raises(Corrupt):
            verify(memoryview(frame), key=header.key)
        frame[position] ^= 1 << position % 8


@given(small_headers, st.data())
@settings(max_examples=50, deadline=None)
def test_a_frame_of_any_other_length_fails_verification(header: FrameHeader, data: st.DataObject) -> None:
    frame = filled_frame(header, seed=3)
    shorter = data.draw(st.integers(0, len(frame) - 1))
    longer = data.draw(st.integers(1, 10000))
    for other in (frame[:shorter], frame + bytes(longer)):
        with pytest.raises(Corrupt):
            verify(memoryview(other), key=header.key)


@given(small_headers, small_headers)
@settings(max_examples=50, deadline=None)
def test_swapped_frames_fail_verification(one: FrameHeader, two: FrameHeader) -> None:
    if one.key == two.key:
        return
    frames = filled_frame(one, seed=1), filled_frame(two, seed=2)
    for frame, wrong in ((frames[0], two), (frames[1], one)):
        with pytest.raises(Corrupt):
            verify(memoryview(frame), key=wrong.key)
        with pytest.raises(Corrupt):
            verify_prefix(memoryview(frame), key=wrong.key)
