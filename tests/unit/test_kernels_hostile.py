"""Compiled kernels against what they must not trust: payloads that overlap, and scales of somebody else's."""

from __future__ import annotations

import contextlib
import errno
import struct
import sys
import threading
from importlib.abc import MetaPathFinder

import pytest

from lmcache_core.kernels import PagedKV, compiled, paged
from lmcache_core.kernels.compiled import native_library

torch = pytest.importorskip("torch")
needs_kernels = pytest.mark.skipif(native_library() is None, reason="lmcache-core-kernels is not installed")


@needs_kernels
def test_a_kernels_package_of_another_abi_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmcache_core_kernels import abi

    monkeypatch.setattr(abi, "ABI", 1)
    assert native_library.__wrapped__() is None
    assert f"it has ABI 1, and {compiled.ABI} is needed" in caplog.text


@needs_kernels
def test_a_library_of_another_abi_than_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache_core_kernels import abi

    monkeypatch.setattr(abi, "_loaded", {})
    built_for = abi.ABI
    monkeypatch.setattr(abi, "ABI", 1)
    with pytest.raises(OSError, match=f"has ABI {built_for}, this package 1"):
        abi.host_library()


@needs_kernels
def test_a_payload_in_the_engines_memory_is_found_beside_one_that_ends_before_it() -> None:
    memory = bytearray(1 << 16)
    blocks = torch.frombuffer(memory, dtype=torch.float32)[4096 : 4096 + 128].view(4, 4, 1, 8)
    kv = PagedKV.from_blocks([blocks], axes="nshe")
    start, nbytes = 4 * 4096, kv.content_nbytes
    long = memoryview(memory)[start - 64 : start - 64 + 12 * nbytes]
    short = memoryview(memory)[start - 48 : start - 48 + nbytes]
    with pytest.raises(ValueError, match="segment 0 of frame 0 overlaps the engine's own memory"):
        kv.scatter_many([(range(12), [long]), (range(12, 13), [short])])
    assert not any(memory)


@needs_kernels
def test_slots_that_change_during_a_call_lead_nowhere_outside_the_kv() -> None:
    """Checked in one pass and used in another, they did within some hundred calls."""
    room = torch.zeros(4 * 4096, 16, 1, 8)
    kv = PagedKV.from_blocks([room[:4096]], axes="nshe")
    slots, outside = torch.arange(4096), kv.num_slots + 5000
    payload = [memoryview(b"\x01" * (len(slots) * kv.content_nbytes))]
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            slots[-1] = outside
            slots[-1] = len(slots) - 1

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(1000):
            with contextlib.suppress(ValueError):
                kv.scatter(slots, payload)
    finally:
        ended.set()
        changing.join()
    assert not room[4096:].any()


@needs_kernels
@pytest.mark.parametrize(
    "scale",
    [
        *(0x00000000, 0x80000000, 0xBF800000, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000),
        *(0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001),
    ],
    ids=hex,
)
def test_any_bits_of_a_scale_widen_as_torch_has_them(scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = bytes([0x00, 0x80, 0x01, 0x81, 0x38, 0xB8, 0x7E, 0xFE])
    payload = memoryview(codes + codes + 2 * struct.pack("<I", scale))

    def widened() -> torch.Tensor:
        blocks = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16)
        PagedKV.from_blocks([blocks], axes="nshe", narrow=True).scatter(range(1), [payload])
        return blocks[0, 0].flatten()

    compiled = widened()
    monkeypatch.setattr(paged, "native_library", lambda: None)
    reference = widened()
    numbers = ~reference.isnan()
    assert torch.equal(compiled.isnan(), reference.isnan())
    assert torch.equal(compiled[numbers].view(torch.int16), reference[numbers].view(torch.int16))


@needs_kernels
def test_a_library_that_does_not_load_is_told_once_and_torch_moves_the_kv(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmcache_core_kernels import abi

    def broken() -> None:
        raise OSError("wrong ELF class")

    monkeypatch.setattr(abi, "host_library", broken)
    native_library.cache_clear()
    try:
        assert native_library() is None
        assert native_library() is None
    finally:
        native_library.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "lmcache-core-kernels can't be used, KV is moved by torch instead: wrong ELF class"
    ]


@needs_kernels
def test_a_package_that_can_not_be_read_just_now_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoMoreFiles(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == "lmcache_core_kernels.abi":
                raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.delitem(sys.modules, "lmcache_core_kernels.abi")
    monkeypatch.delattr("lmcache_core_kernels.abi")
    monkeypatch.setattr(sys, "meta_path", [NoMoreFiles(), *sys.meta_path])
    assert native_library.__wrapped__() is None
    assert "can't be used" in caplog.text
    assert "Too many open files" in caplog.text
