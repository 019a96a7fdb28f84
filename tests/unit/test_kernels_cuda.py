"""CUDA calls that fail, memory that is pinned for it, and KV on devices that nothing here can move."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import DeviceError, PagedKV, pin
from lmcache_core.kernels import device as device_module
from lmcache_core.kernels.device import CudaDevice
from lmcache_core.memory import MemoryPool, mapping


class FakeCuda:
    """The device library, which refuses everything with one error."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def lmck_device_error(self, error: int) -> bytes:
        return b"out of luck"

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            return self.error

        return call


def test_a_cuda_call_that_fails_is_an_error_with_its_numbers() -> None:
    device = CudaDevice(FakeCuda(700), 3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"event_record\(5, 6\) on cuda:3: CUDA error 700, out of luck"):
        device.record(5, 6)
    device = CudaDevice(FakeCuda(0), 3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="the KV is on cuda:3, the calling thread works on cuda:0"):
        device.check_thread()


def test_a_launch_that_fails_is_an_error_with_its_numbers() -> None:
    abi = pytest.importorskip("lmcache_core_kernels.abi")
    layout, frame = abi.Layout(None, 1, 1, 8, 64, 16, 512, 0), abi.Frame(num_tokens=20)
    device = CudaDevice(FakeCuda(abi.CUDA), 1)  # type: ignore[arg-type]
    text = "scatter of 20 tokens and 8 heads, rows of 512 bytes, among 64 slots on cuda:1: CUDA error 0, out"
    with pytest.raises(DeviceError, match=text):
        device.launch(layout, frame, 7, gathering=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A process that uses CUDA."""
    library = FakeCuda(0)
    monkeypatch.setattr(device_module, "cuda_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return library


def test_memory_is_pinned_and_unpinned_by_its_address(cuda: FakeCuda) -> None:
    unpin = pin(4096, 8192)
    assert unpin is not None
    unpin()
    assert cuda.calls == [("lmck_host_register", (4096, 8192)), ("lmck_host_unregister", (4096,))]


def test_memory_that_cannot_be_pinned_is_told_in_one_warning(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = 2
    with caplog.at_level(logging.WARNING):
        pool = MemoryPool(1 << 20, huge_pages=False)
        pool.close()
    [record] = caplog.records
    assert "1048576 bytes of frame memory can't be pinned (CUDA error 2, out of luck)" in record.message
    assert [name for name, _ in cuda.calls] == ["lmck_host_register"]


def test_a_process_that_does_not_use_cuda_pins_nothing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert pin(4096, 8192) is None
    assert not cuda.calls


@pytest.mark.parametrize("leased", [False, True], ids=["unused", "with a view that outlives it"])
def test_a_pool_is_unpinned_once_while_its_memory_is_still_there(
    leased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, events = SimpleNamespace(address=0, nbytes=0), []

    def fake_pin(address: int, nbytes: int) -> Callable[[], None]:
        pinned.address, pinned.nbytes = address, nbytes
        return lambda: events.append(ctypes.string_at(address, 4))  # a crash where it is unmapped

    monkeypatch.setattr(mapping, "pin", fake_pin)
    pool = MemoryPool(1 << 20, huge_pages=False)
    assert (pinned.address, pinned.nbytes) == (pool.base_address, 1 << 20)
    pool.buffer[:4] = b"here"
    view = None
    if leased:
        lease = pool.try_allocate(4096, owner="test")
        assert lease is not None
        view = lease.memory[:]
        lease.release()
    pool.close()
    assert events == ([] if leased else [b"here"])
    del view, pool
    if leased:
        del lease
    gc.collect()
    assert events == [b"here"]


def test_kv_on_a_device_is_not_narrowed() -> None:
    layers = [torch.empty(4, 2, 16, 64, dtype=torch.bfloat16, device="meta")]
    with pytest.raises(UnsupportedModel, match="the KV is on meta; only KV on the host can be narrowed"):
        PagedKV.from_blocks(layers, axes="nhse", narrow=True)


def test_kv_where_no_device_can_move_it_is_refused_and_says_what_is_missing() -> None:
    layers = [torch.empty(4, 2, 16, 64, dtype=torch.bfloat16, device="meta")]
    with pytest.raises(UnsupportedModel, match="the KV is on meta: that needs CUDA"):
        PagedKV.from_blocks(layers, axes="nhse")
    with pytest.raises(UnsupportedModel, match="tensor 1 is on cpu, the first on meta"):
        PagedKV.from_blocks([*layers, torch.empty(4, 2, 16, 64, dtype=torch.bfloat16)], axes="nhse")
