"""Sealing a frame before it leaves the process, and proving that one that came back is whole and its own.

A frame is contiguous here: header, then segments, each padded with zeros to whole pages. Every byte is
under a checksum, so a flipped bit anywhere fails `verify`.
"""

from __future__ import annotations

from dataclasses import replace

from lmcache_core.errors import Corrupt
from lmcache_core.frame.checksum import padded_nbytes, segment_checksum
from lmcache_core.frame.header import FrameHeader, Segment, encode_header, parse_header
from lmcache_core.identity.keys import StorageKey


def payload(memory: memoryview, header: FrameHeader, segment_index: int) -> memoryview:
    """The stored bytes of one segment, without padding: a view into the frame `memory`."""
    start = header.segment_offsets[segment_index]
    return memory[start : start + header.segments[segment_index].stored_nbytes]


def seal(memory: memoryview, header: FrameHeader) -> FrameHeader:
    """Makes `memory`, whose segments are filled in, a frame: zeroes padding, writes the header in front.

    Returns `header` with the checksums of the segments; those it came with are ignored.

    Raises:
        ValueError: `memory` is not flat, writable and exactly `header.frame_nbytes` long.
    """
    memory = _flat(memory)
    if len(memory) != header.frame_nbytes or memory.readonly:
        raise ValueError(
            f"sealing needs {header.frame_nbytes} writable bytes, "
            f"not {len(memory)} (read-only: {memory.readonly})"
        )
    segments = []
    for offset, segment in zip(header.segment_offsets, header.segments, strict=True):
        stored_end = offset + segment.stored_nbytes
        padded_end = offset + padded_nbytes(segment.stored_nbytes)
        memory[stored_end:padded_end] = bytes(padded_end - stored_end)
        checksum = segment_checksum(memory[offset:padded_end])
        segments.append(Segment(segment.stored_nbytes, segment.raw_nbytes, checksum))
    sealed = replace(header, segments=tuple(segments))
    memory[: sealed.header_nbytes] = encode_header(sealed)
    return sealed


def verify(memory: memoryview, *, key: StorageKey, part: str | None = None) -> FrameHeader:
    """The header of the frame that fills `memory`, proved to be intact and to be `key`'s.

    `part` None accepts any part. Costs about 2.5 ms of one core for 32 MiB.

    Raises:
        Corrupt: the frame is damaged, another one, shorter or longer than `memory`. The message says
            which; nothing of the frame may be used.
    """
    memory = _flat(memory)
    header = _verify_header(memory, key, part)
    if len(memory) != header.frame_nbytes:
        raise Corrupt(f"{len(memory)} bytes hold a frame of {header.frame_nbytes}", key=key)
    for index in range(len(header.segments)):
        _verify_segment(memory, header, index)
    return header


def verify_prefix(memory: memoryview, *, key: StorageKey, part: str | None = None) -> FrameHeader:
    """Like `verify`, for the first range of a frame: header and first segment. Later bytes are not read.

    Raises:
        Corrupt: as `verify`, or `memory` ends before the first segment does.
    """
    memory = _flat(memory)
    header = _verify_header(memory, key, part)
    needed_nbytes = header.header_nbytes + padded_nbytes(header.segments[0].stored_nbytes)
    if len(memory) < needed_nbytes:
        raise Corrupt(f"{len(memory)} bytes, header and first segment have {needed_nbytes}", key=key)
    _verify_segment(memory, header, 0)
    return header


def verify_segment(memory: memoryview, header: FrameHeader, index: int) -> None:
    """Proves that `memory`, read by itself, is segment `index` of the frame with this verified header.

    Raises:
        Corrupt: it is anything else, such as the segment of another copy, or ends too soon.
    """
    segment = header.segments[index]
    nbytes = padded_nbytes(segment.stored_nbytes)
    if len(memory) < nbytes or segment_checksum(_flat(memory)[:nbytes]) != segment.checksum:
        raise Corrupt(f"checksum mismatch in segment {index} of {len(header.segments)}", key=header.key)


def _verify_header(memory: memoryview, key: StorageKey, part: str | None) -> FrameHeader:
    try:
        header = parse_header(memory)
    except Corrupt as error:
        error.key = key
        raise
    if header.key != key:
        raise Corrupt(f"the frame's key is {header.key}", key=key)
    if part is not None and header.part != part:
        raise Corrupt(f"the frame's part is {header.part!r}, wanted {part!r}", key=key)
    return header


def _verify_segment(memory: memoryview, header: FrameHeader, index: int) -> None:
    verify_segment(memory[header.segment_offsets[index] :], header, index)


def _flat(memory: memoryview) -> memoryview:
    view = memoryview(memory)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
