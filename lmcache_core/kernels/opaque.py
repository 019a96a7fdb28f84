"""Whole blocks between an engine's KV tensors and frame payloads, for blocks whose inside only it knows."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels.checks import address_of
from lmcache_core.kernels.compiled import NativeCopy, native_library
from lmcache_core.kernels.layout import check_memory
from lmcache_core.kernels.overlap import Rows, Segment, check_planes, check_segments

if TYPE_CHECKING:
    from torch import Tensor


class OpaqueBlocks:
    """An engine's KV tensors `[num blocks, …]`, one a layer, copied block by block and byte by byte.

    A payload is one flat memoryview a layer, `[blocks, block bytes]`, in the order of the block ids. The
    copies let go of the GIL. The tensors' memory must stay what it is while this lives. One object may be
    used by several threads as far as their blocks and payloads don't overlap.

    Raises:
        UnsupportedModel: tensors that aren't alike, aren't on the CPU, or whose blocks have holes or
            overlap, with the numbers.
        ValueError: no layer.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        if not layers:
            raise ValueError("no layer given")
        first = layers[0]
        for number, tensor in enumerate(layers):
            check_memory(number, tensor)
            _check(number, tensor, first)
        self._layers = tuple(layers)  # keeps the memory alive
        self._strides = [tensor.stride(0) * tensor.element_size() for tensor in layers]
        self.num_layers = len(layers)
        self.num_blocks = first.shape[0]
        self.block_nbytes = first[0].numel() * first.element_size()
        self._rows = [
            Rows(tensor.data_ptr(), self.block_nbytes, ((self.num_blocks, stride),) * (self.num_blocks > 1))
            for tensor, stride in zip(layers, self._strides, strict=True)
        ]
        check_planes([[rows] for rows in self._rows])
        self._native: NativeCopy | None = None
        if native_library() is not None:  # to the kernels a block is a row: one head, one slot a block
            planes = [
                [(rows.base, 0, stride, 0)] for rows, stride in zip(self._rows, self._strides, strict=True)
            ]
            self._native = NativeCopy(
                planes,
                num_heads=1,
                num_slots=self.num_blocks,
                block_slots=1,
                row_nbytes=self.block_nbytes,
                threads=1,
            )

    def gather(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None:
        """Copies these blocks into `payload`, for all layers.

        Raises:
            ValueError: ids or payload don't fit; nothing was written.
            TypeError: an id is no integer.
        """
        self._move(block_ids, payload, gathering=True)

    def scatter(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None:
        """Copies `payload` into these blocks, for all layers. No other block is touched.

        Raises:
            ValueError: ids or payload don't fit, or a block is named twice; nothing was written.
            TypeError: an id is no integer.
        """
        self._move(block_ids, payload, gathering=False)

    def _move(self, block_ids: Sequence[int], payload: Sequence[memoryview], *, gathering: bool) -> None:
        ids = [index(block) for block in block_ids]
        segments = tuple(memoryview(segment) for segment in payload)
        if not gathering and len(set(ids)) != len(ids):
            raise ValueError("a block is named twice")
        self._check(ids, segments, written=gathering)
        if self._native is not None:
            self._native.move([(array("q", ids), segments)], gathering=gathering)
            return
        given = [Segment(address_of(memory), memory.nbytes, 0, i) for i, memory in enumerate(segments)]
        check_segments(given, [(rows.base, rows.end) for rows in self._rows], written=gathering)
        for rows, stride, segment in zip(self._rows, self._strides, given, strict=True):
            for place, block, count in self._runs(ids, stride):
                packed, paged = segment.address + place * self.block_nbytes, rows.base + block * stride
                to, source = (packed, paged) if gathering else (paged, packed)
                ctypes.memmove(to, source, count * self.block_nbytes)

    def _runs(self, block_ids: Sequence[int], stride: int) -> Iterator[tuple[int, int, int]]:
        """(position, first block, number of blocks) of stretches that lie together on both sides."""
        start, end = 0, len(block_ids)
        while start < end:
            stop = start + 1
            if stride == self.block_nbytes:
                while stop < end and block_ids[stop] == block_ids[stop - 1] + 1:
                    stop += 1
            yield start, block_ids[start], stop - start
            start = stop

    def _check(self, block_ids: Sequence[int], payload: Sequence[memoryview], *, written: bool) -> None:
        if not block_ids or min(block_ids) < 0 or max(block_ids) >= self.num_blocks:
            raise ValueError(f"block ids {list(block_ids)} are not all among {self.num_blocks}")
        if len(payload) != self.num_layers:
            raise ValueError(f"{len(payload)} payload segments for {self.num_layers} layers")
        nbytes = len(block_ids) * self.block_nbytes
        for layer, memory in enumerate(payload):
            if memory.nbytes != nbytes or (written and memory.readonly) or not memory.c_contiguous:
                wanted = "contiguous writable bytes" if written else "contiguous bytes"
                raise ValueError(
                    f"payload segment {layer} must be {nbytes} {wanted}, not {memory.nbytes} "
                    f"(read-only: {memory.readonly})"
                )


def _check(number: int, tensor: Tensor, first: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedModel(f"tensor {number} is on {tensor.device}; only cpu tensors are supported")
    if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
        raise UnsupportedModel(
            f"tensor {number} is {tensor.dtype} {list(tensor.shape)}, the first {first.dtype} "
            f"{list(first.shape)}"
        )
    if tensor.dim() < 2 or not tensor.numel():
        raise UnsupportedModel(f"a KV tensor of shape {list(tensor.shape)} holds no blocks")
    inner = tensor[0]
    if not inner.is_contiguous() or (tensor.shape[0] > 1 and tensor.stride(0) < inner.numel()):
        raise UnsupportedModel(
            f"the blocks of tensor {number} have holes or overlap: shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )
