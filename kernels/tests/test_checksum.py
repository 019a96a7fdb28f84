"""The compiled segment checksum is the frames' own, bit for bit."""

from __future__ import annotations

import ctypes
import random

import pytest

from lmcache_core.frame import PAGE_NBYTES, segment_checksum
from lmcache_core.frame import checksum as frame_checksum
from lmcache_core_kernels import abi


@pytest.fixture(autouse=True)
def frames_hash_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both sides would be the compiled one."""
    monkeypatch.setattr(frame_checksum, "native_checksum", lambda memory: None)


@pytest.mark.parametrize("num_pages", [0, 1, 2, 29, 30, 31, 63, 64, 65, 128, 129, 257])
@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
def test_the_checksum_of_pages_equals_that_of_frames(num_pages: int, instructions: str) -> None:
    library = abi.host_library()
    best = library.lmck_instructions()
    memory = bytearray(random.Random(num_pages).randbytes(num_pages * PAGE_NBYTES) + b"?")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        if library.lmck_use_instructions(instructions.encode()):
            got = library.lmck_checksum(address, num_pages * PAGE_NBYTES)
            assert got == segment_checksum(memoryview(memory)[: num_pages * PAGE_NBYTES])
    finally:
        library.lmck_use_instructions(best)


def test_every_byte_of_every_page_counts() -> None:
    library = abi.host_library()
    memory = bytearray(3 * PAGE_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    seen = {library.lmck_checksum(address, len(memory))}
    for place in (0, 1, 4095, 4096, 8191, 8192, 12287):
        memory[place] ^= 1
        seen.add(library.lmck_checksum(address, len(memory)))
        memory[place] ^= 1
    assert len(seen) == 8
