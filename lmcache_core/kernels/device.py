"""What staged copies run on: streams, events, copies and launches. CUDA, and pinning for it."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from lmcache_core.errors import LMCacheError

if TYPE_CHECKING:
    from lmcache_core_kernels import abi

log = logging.getLogger(__name__)


class DeviceError(LMCacheError):
    """A device call failed; the message has its name, its numbers and what the driver says."""


class Device(Protocol):
    """Queues of work on memory. Streams, events and addresses are numbers.

    What goes to a stream runs in order; two streams are ordered by events alone. Work is queued, and the
    call returns: only `wait` and `drain` block until work has run. All raise `DeviceError`.
    """

    def check_thread(self) -> None:
        """Raises where the calling thread works on another device: its launches would go there."""

    def current_stream(self) -> int:
        """The stream on which the host engine works on this thread."""

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def new_stream(self) -> int: ...

    def drop_stream(self, stream: int) -> None: ...

    def drain(self, stream: int) -> None:
        """Blocks until all that was queued on `stream` has run."""

    def new_event(self) -> int: ...

    def drop_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """`event` is now the moment when all that was queued on `stream` so far has run."""

    def follow(self, stream: int, event: int) -> None:
        """What comes next on `stream` runs after the moment `event` is now; it was always there if never."""

    def is_done(self, event: int) -> bool: ...

    def wait(self, event: int) -> None:
        """Blocks until the moment that `event` is now."""

    def copy(
        self,
        to: int,
        to_pitch: int,
        source: int,
        source_pitch: int,
        row_nbytes: int,
        num_rows: int,
        stream: int,
    ) -> None:
        """Rows, the pitches apart, between device and host. Memory must stay until they are copied."""

    def launch(self, layout: abi.Layout, frame: abi.Frame, stream: int, *, gathering: bool) -> None:
        """The kernel that moves one frame; layout, frame and what they point to are read at once."""


class CudaDevice:
    """CUDA device `index`, through `lmcache-core-kernels`. It shares torch's context and streams."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library = library
        self._index = index

    def check_thread(self) -> None:
        current = ctypes.c_int32()
        self._call("device_current", current)
        if current.value != self._index:
            raise DeviceError(
                f"the KV is on cuda:{self._index}, the calling thread works on cuda:{current.value}: call "
                f"torch.cuda.set_device({self._index}) on it"
            )

    def current_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("device_allocate", nbytes, address)
        return address.value

    def free(self, address: int) -> None:
        self._call("device_free", address)

    def new_stream(self) -> int:
        stream = ctypes.c_uint64()
        self._call("stream_create", stream)
        return stream.value

    def drop_stream(self, stream: int) -> None:
        self._call("stream_destroy", stream)

    def drain(self, stream: int) -> None:
        self._call("stream_drain", stream)

    def new_event(self) -> int:
        event = ctypes.c_uint64()
        self._call("event_create", event)
        return event.value

    def drop_event(self, event: int) -> None:
        self._call("event_destroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("event_record", event, stream)

    def follow(self, stream: int, event: int) -> None:
        self._call("stream_follow", stream, event)

    def is_done(self, event: int) -> bool:
        done = ctypes.c_int32()
        self._call("event_query", event, done)
        return bool(done.value)

    def wait(self, event: int) -> None:
        self._call("event_wait", event)

    def copy(
        self,
        to: int,
        to_pitch: int,
        source: int,
        source_pitch: int,
        row_nbytes: int,
        num_rows: int,
        stream: int,
    ) -> None:
        self._call("copy_rows", to, to_pitch, source, source_pitch, row_nbytes, num_rows, stream)

    def launch(self, layout: abi.Layout, frame: abi.Frame, stream: int, *, gathering: bool) -> None:
        from lmcache_core_kernels import abi

        fault = abi.Fault()
        move = self._library.lmck_device_gather if gathering else self._library.lmck_device_scatter
        status = move(layout, frame, 1, stream, 0, fault)
        if status == abi.OK:
            return
        why = self._text(fault.value) if status == abi.CUDA else f"status {status}"
        raise DeviceError(f"{_launch_text(gathering, layout, frame)} on cuda:{self._index}: {why}")

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, f"lmck_{name}")(*arguments)
        if error:
            numbers = ", ".join(str(argument) for argument in arguments if isinstance(argument, int))
            raise DeviceError(f"{name}({numbers}) on cuda:{self._index}: {self._text(error)}")

    def _text(self, error: int) -> str:
        return f"CUDA error {error}, {self._library.lmck_device_error(error).decode()}"


def _launch_text(gathering: bool, layout: abi.Layout, frame: abi.Frame) -> str:
    return (
        f"{'gather' if gathering else 'scatter'} of {frame.num_tokens} tokens and {layout.num_heads} heads, "
        f"rows of {layout.row_nbytes} bytes, among {layout.num_slots} slots"
    )


@lru_cache(maxsize=1)
def cuda_library() -> ctypes.CDLL | None:
    """The device library where it is built, loads, and finds a device.

    Asking brings up CUDA's driver in this process, though no context: ask where CUDA is in use.
    """
    try:
        from lmcache_core_kernels.abi import device_library
    except ImportError:
        return None
    try:
        library = device_library()
    except (OSError, AttributeError) as error:
        log.warning("the CUDA part of lmcache-core-kernels can't be used: %s", error)
        return None
    return library if library is not None and library.lmck_device_count() > 0 else None


def cuda_device(index: int) -> CudaDevice | None:
    """Device `index`, where the device library can be used."""
    library = cuda_library()
    return None if library is None else CudaDevice(library, index)


def pin(address: int, nbytes: int) -> Callable[[], None] | None:
    """Registers host memory with CUDA, where this process uses CUDA already; returns what undoes it.

    None where it doesn't (no context is made for it: a scheduler or a command has no business on a GPU), or
    where the driver refuses: copies are of pageable memory then, slower and as right.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    library = cuda_library()
    if library is None:
        return None
    error = library.lmck_host_register(address, nbytes)
    if error:
        log.warning(
            "%d bytes of frame memory can't be pinned (CUDA error %d, %s): copies to and from the GPU are "
            "slower; `ulimit -l` may be too low",
            nbytes,
            error,
            library.lmck_device_error(error).decode(),
        )
        return None

    def unpin() -> None:
        library.lmck_host_unregister(address)  # at exit the driver may be gone, and the pinning with it

    return unpin
