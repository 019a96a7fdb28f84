"""Gather and scatter by the compiled kernels of `lmcache-core-kernels`, where that is installed."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from lmcache_core.kernels.checks import (
    bad_num_layers,
    bad_segment,
    bad_slot,
    check_index,
    check_range,
    overlap,
    slot_twice,
)
from lmcache_core.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from torch import Tensor

    from lmcache_core_kernels import abi

log = logging.getLogger(__name__)

Index: TypeAlias = "range | array[int] | Tensor"
"""Slots of a frame; an array is int64."""

ABI = 3
"""Of the kernels package that this was written for: another one's structures are not these."""


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are not installed, or (told once in the log) can't be loaded."""
    try:
        from lmcache_core_kernels import abi

        if abi.ABI != ABI:
            raise OSError(f"it has ABI {abi.ABI}, and {ABI} is needed: install the version of this core")
        return abi.host_library()
    except ImportError:
        return None
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
    from lmcache_core_kernels.buffer import Buffer

    with Buffer(memory, writable=False) as buffer:
        return int(library.lmck_checksum(buffer.address, buffer.nbytes))


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

    `planes` are as `planes_of` has them. The memory is the caller's to keep. Needs `native_library`.
    """

    def __init__(
        self,
        planes: Sequence[Sequence[tuple[int, int, int, int]]],
        *,
        num_heads: int,
        num_slots: int,
        block_slots: int,
        row_nbytes: int,
        threads: int,
        narrow_dim: int = 0,
    ) -> None:
        from lmcache_core_kernels import abi

        flat = [abi.Plane(*plane) for layer in planes for plane in layer]
        self._abi = abi
        self._move_payloads = abi.payload_mover()
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

    def move(self, frames: Sequence[tuple[Index, Sequence[memoryview]]], *, gathering: bool) -> None:
        """One call for all `frames`.

        Raises:
            ValueError: slots or payload don't fit; nothing was written.
        """
        frames = tuple(frames)  # other threads may change the lists
        if not frames:
            return
        payloads = tuple([tuple(payload) for _, payload in frames])
        indices = [self._index(slots) for slots, _ in frames]
        abi, write = self._abi, self._abi.FRAME.pack_into
        table, fault = (abi.Frame * len(frames))(), abi.Fault()
        for i, index in enumerate(indices):
            if isinstance(index, range):
                entry = (0, 0, 0, index.start, len(index))
            elif isinstance(index, array):
                at, num_tokens = index.buffer_info()
                entry = (at, 0, index.itemsize, 0, num_tokens)
            else:
                entry = (index.data_ptr(), 0, index.element_size(), 0, index.numel())
            write(table, i * abi.FRAME.size, *entry)
        try:
            status = self._move_payloads(
                payloads, self._layout, table, len(frames), self._threads, gathering, fault
            )
        except BufferError as error:
            raise self._unusable(indices, payloads, gathering=gathering) from error
        if status != abi.OK:
            raise self._refusal(status, fault, indices, payloads, gathering=gathering)

    def _index(self, slots: Index) -> Index:
        """Slots that the kernels can read, and whose values they check; a tensor's may be a copy."""
        if isinstance(slots, range):
            check_range(slots, self._num_slots)
        elif not isinstance(slots, array):
            check_index(slots)
            slots = slots.contiguous()
        return slots

    def _refusal(
        self,
        status: int,
        fault: abi.Fault,
        indices: Sequence[Index],
        payloads: Sequence[Sequence[memoryview]],
        *,
        gathering: bool,
    ) -> Exception:
        abi, frame, place, value = self._abi, fault.frame, fault.place, fault.value
        if status == abi.NUM_LAYERS:
            return bad_num_layers(frame, value, self._num_layers)
        if status == abi.BAD_SEGMENT:
            nbytes = self._token_nbytes * len(indices[frame])
            return bad_segment(frame, place, nbytes, payloads[frame][place], written=gathering)
        if status == abi.BAD_SLOT:
            return bad_slot(frame, place, value, self._num_slots)
        if status == abi.SLOT_TWICE:
            return slot_twice(frame, place, value)
        if status == abi.OVERLAP:
            return overlap(frame, place, engine=bool(value))
        if status == abi.NO_MEMORY:
            return MemoryError("no memory for the index of a gather or scatter")
        return AssertionError(f"the kernels refused a layout that was checked (status {status})")

    def _unusable(
        self, indices: Sequence[Index], payloads: Sequence[Sequence[memoryview]], *, gathering: bool
    ) -> ValueError:
        for frame, payload in enumerate(payloads):
            nbytes = self._token_nbytes * len(indices[frame])
            for layer, segment in enumerate(payload):
                view = memoryview(segment)
                if not view.c_contiguous or (gathering and view.readonly):
                    return bad_segment(frame, layer, nbytes, view, written=gathering)
        return ValueError("a payload segment gives no access to its memory")


class CompiledMover:
    """What `PagedKV` runs on where the compiled kernels are installed."""

    def __init__(self, layout: PagedLayout, threads: int) -> None:
        self._layout = layout  # keeps the memory alive
        self._copy = NativeCopy(
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
