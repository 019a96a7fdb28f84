"""The C ABI as ctypes sees it: structures, prototypes, and finding the libraries. Mirrors the C header."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import lmcache_core_kernels

ABI = 3
"""What this module was written for; a library of another number is refused."""


class Plane(ctypes.Structure):
    """Where a layer keeps K, V, or both of every token: address and strides in bytes."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("head_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
    )


class Layout(ctypes.Structure):
    """An engine's KV: `planes` is the address of `[num_layers][num_planes]` of `Plane`."""

    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("num_planes", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("block_slots", ctypes.c_int64),
        ("row_nbytes", ctypes.c_int64),
        ("narrow", ctypes.c_int64),
    )


class Frame(ctypes.Structure):
    """One chunk: addresses of its slots (or none, and the first slot) and of its segments' addresses."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("slot_nbytes", ctypes.c_int64),
        ("first_slot", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


FRAME = struct.Struct("PPqqq")
"""The same, to be written into an array of them."""
assert FRAME.size == ctypes.sizeof(Frame)


class Fault(ctypes.Structure):
    """Where a check failed: frame, token or layer, and the value found."""

    _fields_ = (("frame", ctypes.c_int64), ("place", ctypes.c_int64), ("value", ctypes.c_int64))


(
    OK,
    BAD_SLOT,
    SLOT_TWICE,
    OVERLAP,
    BAD_SHAPE,
    NO_MEMORY,
    CUDA,
    NUM_LAYERS,
    BAD_SEGMENT,
    RAISED,
) = range(10)

_lock = threading.Lock()  # guards _loaded
_loaded: dict[str, ctypes.CDLL] = {}


def host_library() -> ctypes.CDLL:
    """The host's functions, loaded on first use. Calls release the GIL.

    Raises:
        OSError: the library is missing, doesn't load, or has another ABI than this package.
    """
    return _load("lmcache_core_kernels", declare_host)


def device_library() -> ctypes.CDLL | None:
    """The device's functions; None where nvcc was not there at build time. Loads without a driver.

    Raises:
        OSError: the library doesn't load, or has another ABI than this package.
    """
    if not _path("lmcache_core_kernels_cuda").exists():
        return None
    return _load("lmcache_core_kernels_cuda", declare_device)


def _path(name: str) -> Path:
    """Of a library: beside the sources, or where an editable install keeps what it built."""
    file = f"lib{name}.so"
    directories = [Path(directory) for directory in lmcache_core_kernels.__path__]
    return next((d / file for d in directories if (d / file).exists()), directories[0] / file)


_PYTHON = (
    "PyObject_GetBuffer",
    "PyBuffer_Release",
    "PyTuple_Size",
    "PyTuple_GetItem",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)


@lru_cache(maxsize=1)
def payload_mover() -> Callable[..., int]:
    """`lmck_move_payloads` without its first argument. It keeps the GIL, and raises what Python raised.

    Raises:
        OSError: as `host_library`.
    """
    host_library()  # checked
    functions = (ctypes.c_void_p * len(_PYTHON))(
        *(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _PYTHON)
    )
    move = ctypes.PyDLL(str(_path("lmcache_core_kernels"))).lmck_move_payloads
    layout, frame, fault = ctypes.POINTER(Layout), ctypes.POINTER(Frame), ctypes.POINTER(Fault)
    count, number = ctypes.c_int64, ctypes.c_int32
    move.argtypes = [ctypes.c_void_p, ctypes.py_object, layout, frame, count, number, number, fault]
    return partial(move, functions)


def _load(name: str, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    with _lock:
        if name not in _loaded:
            library = ctypes.CDLL(str(_path(name)))
            try:
                if library.lmck_abi() != ABI:
                    raise OSError(f"{_path(name)} has ABI {library.lmck_abi()}, this package {ABI}")
                declare(library)
            except AttributeError as error:
                raise OSError(f"{_path(name)} is another library: {error}") from error
            _loaded[name] = library
        return _loaded[name]


def declare_host(library: ctypes.CDLL) -> None:
    layout, frame, fault = ctypes.POINTER(Layout), ctypes.POINTER(Frame), ctypes.POINTER(Fault)
    for move in (library.lmck_gather, library.lmck_scatter):
        move.argtypes = [layout, frame, ctypes.c_int64, ctypes.c_int32, fault]
    for twin in (library.lmck_gather_twin, library.lmck_scatter_twin):
        twin.argtypes = [layout, frame, ctypes.POINTER(ctypes.c_int64)]
    library.lmck_checksum.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.lmck_checksum.restype = ctypes.c_uint64
    library.lmck_instructions.restype = ctypes.c_char_p
    library.lmck_use_instructions.argtypes = [ctypes.c_char_p]


def declare_device(library: ctypes.CDLL) -> None:
    library.lmck_device_built_for.restype = ctypes.c_char_p
    library.lmck_device_error.restype = ctypes.c_char_p
    layout, frame, fault = ctypes.POINTER(Layout), ctypes.POINTER(Frame), ctypes.POINTER(Fault)
    for move in (library.lmck_device_gather, library.lmck_device_scatter):
        move.argtypes = [layout, frame, ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64, fault]
    address, nbytes, number = ctypes.c_uint64, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64)
    flag = ctypes.POINTER(ctypes.c_int32)
    for name, arguments in {
        "device_current": [flag],
        "host_register": [address, nbytes],
        "host_unregister": [address],
        "device_allocate": [nbytes, number],
        "device_free": [address],
        "stream_create": [number],
        "stream_destroy": [address],
        "stream_follow": [address, address],
        "stream_drain": [address],
        "event_create": [number],
        "event_destroy": [address],
        "event_record": [address, address],
        "event_query": [address, flag],
        "event_wait": [address],
        "copy_rows": [address, nbytes, address, nbytes, nbytes, nbytes, address],
    }.items():
        getattr(library, f"lmck_{name}").argtypes = arguments
