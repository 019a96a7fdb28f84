"""Frames: self-describing, checksummed containers for one part of one chunk's KV."""

from lmcache_core.frame.checksum import PAGE_NBYTES, padded_nbytes, segment_checksum
from lmcache_core.frame.header import (
    FrameHeader,
    FrameKind,
    Segment,
    encode_header,
    parse_header,
)
from lmcache_core.frame.seal import payload, seal, verify, verify_prefix, verify_segment

__all__ = [
    "PAGE_NBYTES",
    "FrameHeader",
    "FrameKind",
    "Segment",
    "encode_header",
    "padded_nbytes",
    "parse_header",
    "payload",
    "seal",
    "segment_checksum",
    "verify",
    "verify_prefix",
    "verify_segment",
]
