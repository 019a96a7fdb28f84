"""Gather and scatter by the compiled kernels of `lmcache-core-kernels`, where that is installed."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lmcache_core.kernels.checks import (
    bad_segment,
    bad_slot,
    check_index,
    check_layers,
    check_range,
    overlap,
    slot_twice,
)
from lmcache_core.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from torch import Tensor

    from lmcache_core_kernels import abi

log = logging.getLogger(__name__)

ABI = 2
"""Of the kernels package that this was written for: another one's structures are not these."""


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are not installed, or (told once in the log) can't be loaded."""
    try:
        from lmcache_core_kernels import abi
    except ImportError:
        return None
    try:
        if abi.ABI != ABI:
            raise OSError(f"it has ABI {abi.ABI}, and {ABI} is needed: install the version of this core")
        return abi.host_library()
    except OSError as error:
        log.warning("lmcache-core-kernels can't be used, KV is moved by torch instead: %s", error)
        return None


def mover_text() -> str:
    """One line that says what moves KV here, and what the compiled kernels were built for."""
    if native_library() is None:
        return "torch (lmcache-core-kernels is not installed, or can't be loaded: see the log)"
    from lmcache_core_kernels import build_info

    return str(build_info())


def native_checksum(memory: memoryview) -> int | None:
    """The paged checksum of whole pages (lmcache_core.frame) in one call; None without the kernels."""
    library = native_library()
    if library is None:
        return None
    from lmcache_core_kernels.buffers import Buffers

    with Buffers([memory], writable=False) as buffers:
        return int(library.lmck_checksum(buffers.addresses[0], buffers.nbytes[0]))


def planes_of(layout: PagedLayout) -> list[list[tuple[int, int, int, int]]]:
    """Of each layer one or two of (base address, head, block and slot stride in bytes)."""
    nbytes = layout.content.item_nbytes
    planes = []
    for layer in layout.layers:
        table = []
        for plane in layer:
            heads, blocks, slots, _ = plane.tensor.stride()
            table.append((plane.tensor.data_ptr(), heads * nbytes, blocks * nbytes, slots * nbytes))
        planes.append(table)
    return planes


class NativeCopy:
    """Rows `[layer][head][slot]` of memory given by address and strides, moved by the compiled kernels.

    `planes` are as `planes_of` has them. The memory is the caller's to keep.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        planes: Sequence[Sequence[tuple[int, int, int, int]]],
        *,
        num_heads: int,
        num_slots: int,
        block_slots: int,
        row_nbytes: int,
        threads: int,
        narrow_dim: int = 0,
    ) -> None:
        from lmcache_core_kernels import abi, buffers

        flat = [abi.Plane(*plane) for layer in planes for plane in layer]
        self._abi = abi
        self._buffers = buffers.Buffers
        self._library = library
        self._table = (abi.Plane * len(flat))(*flat)
        self._layout = abi.Layout(
            ctypes.addressof(self._table),
            len(planes),
            len(planes[0]),
            num_heads,
            num_slots,
            block_slots,
            row_nbytes,
            narrow_dim,
        )
        content_nbytes = 2 * narrow_dim + 8 if narrow_dim else len(planes[0]) * row_nbytes
        self._token_nbytes = num_heads * content_nbytes
        self._threads = threads
        self._num_layers = len(planes)
        self._num_slots = num_slots

    def move(
        self,
        frames: Sequence[tuple[range | array[int] | Tensor, Sequence[memoryview]]],
        *,
        gathering: bool,
    ) -> None:
        """One call for all `frames`; slots in an array are int64.

        Raises:
            ValueError: slots or payload don't fit; nothing was written.
        """
        abi, num_layers = self._abi, self._num_layers
        if not frames:
            return
        frames = [(slots, tuple(payload)) for slots, payload in frames]  # other threads may change the lists
        for frame, (_, payload) in enumerate(frames):
            check_layers(frame, payload, num_layers)
        views = frames[0][1] if len(frames) == 1 else [view for _, payload in frames for view in payload]
        table = (abi.Frame * len(frames))()
        try:
            with self._buffers(views, writable=gathering) as buffers:
                segments = array("Q", buffers.addresses)
                address, _ = segments.buffer_info()
                keep = []
                for i, (slots, _) in enumerate(frames):
                    entry, first = table[i], i * num_layers
                    keep.append(self._put_slots(entry, slots))
                    entry.segments = address + 8 * first
                    nbytes = self._token_nbytes * entry.num_tokens
                    found = buffers.nbytes[first : first + num_layers]
                    if found.count(nbytes) != num_layers:
                        layer = next(j for j in range(num_layers) if found[j] != nbytes)
                        raise bad_segment(i, layer, nbytes, views[first + layer], written=gathering)
                self._call(table, len(frames), gathering=gathering)
        except BufferError as error:
            raise self._unusable(frames, gathering=gathering) from error

    def _put_slots(self, entry: abi.Frame, slots: range | array[int] | Tensor) -> object:
        """Returns what must outlive the call."""
        if isinstance(slots, range):
            check_range(slots, self._num_slots)
            entry.first_slot, entry.num_tokens = slots.start, len(slots)
            return slots
        if isinstance(slots, array):
            entry.num_tokens = len(slots)
            entry.slots, entry.slot_nbytes = slots.buffer_info()[0], 8
            return slots
        check_index(slots)
        if not slots.is_contiguous():
            slots = slots.contiguous()
        entry.num_tokens = slots.numel()
        entry.slots, entry.slot_nbytes = slots.data_ptr(), slots.element_size()
        return slots

    def _call(self, table: ctypes.Array[abi.Frame], num_frames: int, *, gathering: bool) -> None:
        abi, fault = self._abi, self._abi.Fault()
        move = self._library.lmck_gather if gathering else self._library.lmck_scatter
        status = move(self._layout, table, num_frames, self._threads, fault)
        if status == abi.OK:
            return
        if status == abi.BAD_SLOT:
            raise bad_slot(fault.frame, fault.place, fault.value, self._num_slots)
        if status == abi.SLOT_TWICE:
            raise slot_twice(fault.frame, fault.place, fault.value)
        if status == abi.OVERLAP:
            raise overlap(fault.frame, fault.place, engine=bool(fault.value))
        if status == abi.NO_MEMORY:
            raise MemoryError("no memory for the index of a gather or scatter")
        raise AssertionError(f"the kernels refused a layout that was checked (status {status})")

    def _unusable(
        self,
        frames: Sequence[tuple[range | array[int] | Tensor, Sequence[memoryview]]],
        *,
        gathering: bool,
    ) -> ValueError:
        for i, (slots, payload) in enumerate(frames):
            for layer, view in enumerate(memoryview(segment) for segment in payload):
                if not view.c_contiguous or (gathering and view.readonly):
                    return bad_segment(i, layer, self._token_nbytes * len(slots), view, written=gathering)
        return ValueError("a payload segment gives no access to its memory")


class CompiledMover:
    """What `PagedKV` runs on where the compiled kernels are installed."""

    def __init__(self, library: ctypes.CDLL, layout: PagedLayout, threads: int) -> None:
        self._layout = layout  # keeps the memory alive
        self._copy = NativeCopy(
            library,
            planes_of(layout),
            num_heads=layout.num_heads,
            num_slots=layout.num_slots,
            block_slots=layout.block_slots,
            row_nbytes=layout.row_nbytes,
            threads=threads,
            narrow_dim=layout.content.dim if layout.content.narrow else 0,
        )

    def move(self, frames: Sequence[tuple[range | Tensor, Sequence[memoryview]]], *, gathering: bool) -> None:
        self._copy.move(frames, gathering=gathering)
