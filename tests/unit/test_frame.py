"""Encoding, sealing and verifying frames by example."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from lmcache_core.errors import Corrupt
from lmcache_core.frame import (
    PAGE_NBYTES,
    FrameHeader,
    FrameKind,
    Segment,
    encode_header,
    parse_header,
    payload,
    seal,
    segment_checksum,
    verify,
    verify_prefix,
)
from lmcache_core.identity.keys import StorageKey

KEY = StorageKey("c-00112233445566aa-" + "1f" * 32)
OTHER_KEY = StorageKey("c-00112233445566aa-" + "2e" * 32)
PART = "00112233445566aa"


def make_header(key: StorageKey = KEY, lengths: tuple[int, ...] = (5000, 4096, 1)) -> FrameHeader:
    return FrameHeader(
        kind=FrameKind.CHUNK,
        key=key,
        parent=None,
        part=PART,
        content_format="kv float32 64",
        first_token=0,
        num_tokens=16,
        segments=tuple(Segment(nbytes, nbytes) for nbytes in lengths),
    )


def sealed_frame(key: StorageKey = KEY, lengths: tuple[int, ...] = (5000, 4096, 1)) -> bytearray:
    header = make_header(key, lengths)
    frame = bytearray(b"\xee" * header.frame_nbytes)
    view = memoryview(frame)
    for index in range(len(lengths)):
        segment = payload(view, header, index)
        segment[:] = bytes((index + i) % 251 for i in range(len(segment)))
    seal(view, header)
    return frame


def test_header_and_segments_start_at_page_multiples() -> None:
    header = make_header()
    assert header.header_nbytes == 4096
    assert header.segment_offsets == (4096, 4096 + 8192, 4096 + 8192 + 4096)
    assert header.frame_nbytes == 4096 + 8192 + 4096 + 4096


def test_a_header_with_many_segments_takes_as_many_pages_as_it_needs() -> None:
    header = make_header(lengths=(1,) * 4096)
    encoded = encode_header(header)
    assert len(encoded) == header.header_nbytes == 25 * PAGE_NBYTES
    assert parse_header(memoryview(encoded)) == header


def test_a_header_pickles() -> None:
    header = make_header()
    copy = pickle.loads(pickle.dumps(header))
    assert copy == header
    assert copy.segment_offsets == header.segment_offsets


def test_the_checksum_is_the_hash_of_the_little_endian_hashes_of_the_pages() -> None:
    memory = bytes(range(256)) * 48
    pages = [xxhash.xxh3_64_intdigest(memory[i : i + 4096]) for i in range(0, len(memory), 4096)]
    want = xxhash.xxh3_64_intdigest(struct.pack("<3Q", *pages))
    assert segment_checksum(memoryview(memory)) == want


def test_the_checksum_and_the_encoding_never_change_between_releases() -> None:
    """Frames outlive a release: a new value here orphans every stored frame."""
    assert segment_checksum(memoryview(bytes(range(256)) * 32)) == 0xD6DA0F0BC5D350DC
    assert xxhash.xxh3_64_intdigest(encode_header(make_header())) == 0xA9E778570A25F9C0


def test_the_checksum_refuses_part_of_a_page() -> None:
    with pytest.raises(ValueError, match="4097"):
        segment_checksum(memoryview(bytes(4097)))


def test_a_sealed_frame_verifies_and_says_what_was_sealed() -> None:
    frame = sealed_frame()
    header = verify(memoryview(frame), key=KEY, part=PART)
    assert replace(header, segments=make_header().segments) == make_header()
    assert bytes(payload(memoryview(frame), header, 1)) == bytes((1 + i) % 251 for i in range(4096))
    assert len(payload(memoryview(frame), header, 2)) == 1


def test_sealing_zeroes_the_padding_and_returns_the_header_it_wrote() -> None:
    header = make_header()
    frame = bytearray(b"\xee" * header.frame_nbytes)
    sealed = seal(memoryview(frame), header)
    assert frame[4096 + 5000 : 4096 + 8192] == bytes(8192 - 5000)
    assert frame[-4095:] == bytes(4095)
    assert frame[4096:9096] == b"\xee" * 5000
    assert verify(memoryview(frame), key=KEY) == sealed


def test_sealing_twice_gives_the_same_bytes() -> None:
    frame = sealed_frame()
    again = bytearray(frame)
    seal(memoryview(again), parse_header(memoryview(frame)))
    assert again == frame


@pytest.mark.parametrize("extra", [-4096, -1, 1, 4096])
def test_sealing_needs_memory_of_exactly_the_frames_length(extra: int) -> None:
    header = make_header()
    with pytest.raises(ValueError, match=str(header.frame_nbytes)):
        seal(memoryview(bytearray(header.frame_nbytes + extra)), header)


def test_sealing_refuses_read_only_memory() -> None:
    header = make_header()
    with pytest.raises(ValueError, match="read-only: True"):
        seal(memoryview(bytes(header.frame_nbytes)), header)


def test_a_frame_stored_under_another_key_is_corrupt() -> None:
    with pytest.raises(Corrupt, match=f"key is {OTHER_KEY}") as caught:
        verify(memoryview(sealed_frame(OTHER_KEY)), key=KEY, part=PART)
    assert caught.value.key == KEY


def test_a_frame_of_another_part_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="part is '00112233445566aa', wanted 'ffffffffffffffff'"):
        verify(memoryview(sealed_frame()), key=KEY, part="f" * 16)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 8192, 20479])
def test_a_truncated_frame_is_corrupt(nbytes: int) -> None:
    with pytest.raises(Corrupt):
        verify(memoryview(sealed_frame())[:nbytes], key=KEY, part=PART)


@pytest.mark.parametrize("nbytes", [1, 4096])
def test_a_frame_with_bytes_after_it_is_corrupt(nbytes: int) -> None:
    with pytest.raises(Corrupt, match="bytes hold a frame of 20480"):
        verify(memoryview(sealed_frame() + bytes(nbytes)), key=KEY, part=PART)


def test_a_damaged_segment_is_named() -> None:
    frame = sealed_frame()
    frame[4096 + 8192 + 7] ^= 0x10
    with pytest.raises(Corrupt, match="segment 1 of 3"):
        verify(memoryview(frame), key=KEY, part=PART)


def test_two_swapped_pages_of_a_segment_are_corrupt() -> None:
    frame = sealed_frame(lengths=(8192,))
    frame[4096:8192], frame[8192:12288] = frame[8192:12288], frame[4096:8192]
    with pytest.raises(Corrupt, match="segment 0 of 1"):
        verify(memoryview(frame), key=KEY, part=PART)


def test_segments_of_two_frames_do_not_mix() -> None:
    """What a ranged read of two copies would see: the header of one, a segment of the other."""
    frame, other = sealed_frame(lengths=(4096, 4096)), sealed_frame(lengths=(4096, 4096))
    other[4096:8192] = bytes(4096)
    frame[4096:8192] = other[4096:8192]
    with pytest.raises(Corrupt, match="segment 0 of 2"):
        verify(memoryview(frame), key=KEY, part=PART)


def test_a_prefix_needs_the_header_and_the_first_segment_only() -> None:
    frame = sealed_frame()
    whole = verify(memoryview(frame), key=KEY, part=PART)
    frame[-1] ^= 1
    prefix = memoryview(frame)[: 4096 + 8192]
    assert verify_prefix(prefix, key=KEY, part=PART) == whole
    assert verify_prefix(memoryview(frame), key=KEY, part=PART) == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda frame: frame[: 4096 + 8191],
        lambda frame: frame[:4096],
        lambda frame: frame[:4100] + b"\x77" + frame[4101:],
        lambda frame: frame[:9] + b"\x77" + frame[10:],
    ],
    ids=["short", "header only", "segment", "header"],
)
def test_a_damaged_prefix_is_corrupt(damage: Callable[[bytearray], bytearray]) -> None:
    with pytest.raises(Corrupt):
        verify_prefix(memoryview(damage(sealed_frame())), key=KEY, part=PART)


def test_a_prefix_of_another_key_or_part_is_corrupt() -> None:
    frame = memoryview(sealed_frame())
    with pytest.raises(Corrupt, match="key is"):
        verify_prefix(frame, key=OTHER_KEY, part=PART)
    with pytest.raises(Corrupt, match="part is"):
        verify_prefix(frame, key=KEY, part="f" * 16)


def test_memory_of_wider_items_is_taken_as_bytes() -> None:
    frame = sealed_frame()
    assert verify(memoryview(frame).cast("Q"), key=KEY, part=PART).key == KEY


@pytest.mark.parametrize(
    "change",
    [
        {"key": "C-1"},
        {"key": "k" * 121},
        {"key": "c-1\n"},
        {"parent": ""},
        {"part": "0" * 15},
        {"part": "A" * 16},
        {"content_format": "é"},
        {"content_format": "x" * 129},
        {"key_id": "a\0"},
        {"codecs": ("",)},
        {"codecs": ("z",) * 9},
        {"segments": ()},
        {"segments": (Segment(1, 1),) * 4097},
        {"segments": (Segment(0, 0),)},
        {"segments": (Segment(2, 1),)},
        {"segments": (Segment(2**40 + 1, 2**40 + 1),)},
        {"segments": (Segment(1, 1, 2**64),)},
        {"segments": (Segment(1, 1, -1),)},
        {"num_tokens": 0},
        {"num_tokens": 2**31},
        {"first_token": -1},
        {"kind": 1},
        {"kind": FrameKind.RECORD},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_header_that_breaks_a_rule_cannot_be_made(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(make_header(), **change)  # type: ignore[arg-type]
