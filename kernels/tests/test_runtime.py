"""The runtime functions of the device library: on a GPU they do what they say, without one they say so."""

from __future__ import annotations

import ctypes

import pytest

from lmcache_core.kernels import DeviceError
from lmcache_core.kernels.device import CudaDevice
from lmcache_core_kernels import abi

LIBRARY = abi.device_library()
HAS_GPU = LIBRARY is not None and LIBRARY.lmck_device_count() > 0

needs_device_library = pytest.mark.skipif(LIBRARY is None, reason="built without nvcc")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
CALLS = {
    "device_current": (ctypes.c_int32(),),
    "host_register": (4096, 4096),
    "host_unregister": (4096,),
    "device_allocate": (4096, ctypes.c_uint64()),
    "device_free": (4096,),
    "stream_create": (ctypes.c_uint64(),),
    "stream_destroy": (1,),
    "stream_follow": (0, 1),
    "stream_drain": (0,),
    "event_create": (ctypes.c_uint64(),),
    "event_destroy": (1,),
    "event_record": (1, 0),
    "event_query": (1, ctypes.c_int32()),
    "event_wait": (1,),
    "copy_rows": (0, 64, 0, 64, 16, 4, 0),
}


@pytest.mark.gpu
@needs_device_library
@pytest.mark.skipif(HAS_GPU, reason="for machines without a GPU")
@pytest.mark.parametrize("name", CALLS)
def test_without_a_gpu_each_call_is_refused_with_an_error_that_has_a_text(name: str) -> None:
    assert LIBRARY is not None
    error = getattr(LIBRARY, f"lmck_{name}")(*CALLS[name])
    assert error > 0
    assert LIBRARY.lmck_device_error(error)


@pytest.mark.gpu
@needs_device_library
@pytest.mark.skipif(HAS_GPU, reason="for machines without a GPU")
def test_without_a_gpu_a_device_raises_the_drivers_own_words() -> None:
    assert LIBRARY is not None
    with pytest.raises(DeviceError, match=r"stream_create\(\) on cuda:0: CUDA error \d+, \w+"):
        CudaDevice(LIBRARY, 0).new_stream()


@pytest.mark.gpu
@needs_gpu
def test_rows_with_pitches_go_to_the_device_and_back_in_pinned_memory() -> None:
    assert LIBRARY is not None
    device = CudaDevice(LIBRARY, 0)
    device.check_thread()
    stream, event, memory = device.new_stream(), device.new_event(), device.allocate(4096)
    host = ctypes.create_string_buffer(bytes(range(256)) * 16, 4096)
    back = ctypes.create_string_buffer(b"\xa5" * 4096, 4096)
    assert LIBRARY.lmck_host_register(ctypes.addressof(host), 4096) == 0
    device.copy(memory, 16, ctypes.addressof(host), 64, 16, 8, stream)
    device.copy(ctypes.addressof(back), 32, memory, 16, 16, 8, stream)
    device.record(event, stream)
    device.wait(event)
    assert device.is_done(event)
    for row in range(8):
        assert back.raw[row * 32 : row * 32 + 16] == host.raw[row * 64 : row * 64 + 16]
        assert back.raw[row * 32 + 16 : row * 32 + 32] == b"\xa5" * 16
    assert LIBRARY.lmck_host_unregister(ctypes.addressof(host)) == 0
    device.free(memory)
    device.drop_event(event)
    device.drop_stream(stream)
