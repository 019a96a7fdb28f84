"""The paged checksum: XXH3-64 of the XXH3-64s of a segment's 4 KiB pages."""

from __future__ import annotations

from array import array

import xxhash

from lmcache_core.kernels import native_checksum

PAGE_NBYTES = 4096
"""Headers and segments start at, and are padded to, a multiple of this."""


def padded_nbytes(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def segment_checksum(memory: memoryview) -> int:
    """The checksum of one segment, padding included: `memory` is flat bytes, whole pages.

    Each page's XXH3-64 (seed 0) is written as 8 little-endian bytes, in page order; the checksum is the
    XXH3-64 of those. Pages are independent of each other, so they can be hashed in parallel elsewhere.

    Raises:
        ValueError: `memory` is not a multiple of 4096 bytes.
    """
    nbytes = len(memory)
    if nbytes % PAGE_NBYTES:
        raise ValueError(f"a segment of {nbytes} bytes is not a multiple of {PAGE_NBYTES}")
    checksum = native_checksum(memory)
    return _checksum_by_page(memory) if checksum is None else checksum


def _checksum_by_page(memory: memoryview) -> int:
    digest, nbytes = xxhash.xxh3_64_digest, len(memory)
    pages = array("Q", b"".join([digest(memory[i : i + PAGE_NBYTES]) for i in range(0, nbytes, PAGE_NBYTES)]))
    pages.byteswap()  # a digest is big-endian on every host, and byteswap reverses bytes on every host
    return xxhash.xxh3_64_intdigest(pages)
