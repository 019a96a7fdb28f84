"""Whole blocks between an engine's KV tensors and frame payloads, for blocks whose inside only it knows."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels.compiled import NativeCopy, native_library

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
        for index, tensor in enumerate(layers):
            _check(index, tensor, first)
        self._layers = tuple(layers)  # keeps the memory alive
        self._addresses = [tensor.data_ptr() for tensor in layers]
        self._strides = [tensor.stride(0) * tensor.element_size() for tensor in layers]
        self.num_layers = len(layers)
        self.num_blocks = first.shape[0]
        self.block_nbytes = first[0].numel() * first.element_size()
        library = native_library()
        self._native: NativeCopy | None = None
        if library is not None:  # to the kernels a block is a row: one head, one slot a block
            planes = [
                [(address, 0, stride, 0)]
                for address, stride in zip(self._addresses, self._strides, strict=True)
            ]
            self._native = NativeCopy(
                library,
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
        """
        self._check(block_ids, payload, written=True)
        if self._native is not None:
            self._native.move([(array("q", block_ids), payload)], gathering=True)
            return
        for address, stride, memory in zip(self._addresses, self._strides, payload, strict=True):
            segment = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for place, block, count in self._runs(block_ids, stride):
                at, nbytes = segment + place * self.block_nbytes, count * self.block_nbytes
                ctypes.memmove(at, address + block * stride, nbytes)

    def scatter(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None:
        """Copies `payload` into these blocks, for all layers. No other block is touched.

        Raises:
            ValueError: ids or payload don't fit, or a block is named twice; nothing was written.
        """
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block is named twice")
        self._check(block_ids, payload, written=False)
        if self._native is not None:
            self._native.move([(array("q", block_ids), payload)], gathering=False)
            return
        for address, stride, memory in zip(self._addresses, self._strides, payload, strict=True):
            segment = _address(memory)
            for place, block, count in self._runs(block_ids, stride):
                at, nbytes = segment + place * self.block_nbytes, count * self.block_nbytes
                ctypes.memmove(address + block * stride, at, nbytes)

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


def _check(index: int, tensor: Tensor, first: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedModel(f"tensor {index} is on {tensor.device}; only cpu tensors are supported")
    if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
        raise UnsupportedModel(
            f"tensor {index} is {tensor.dtype} {list(tensor.shape)}, the first {first.dtype} "
            f"{list(first.shape)}"
        )
    if tensor.dim() < 2 or not tensor.numel():
        raise UnsupportedModel(f"a KV tensor of shape {list(tensor.shape)} holds no blocks")
    inner = tensor[0]
    if not inner.is_contiguous() or (tensor.shape[0] > 1 and tensor.stride(0) < inner.numel()):
        raise UnsupportedModel(
            f"the blocks of tensor {index} have holes or overlap: shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )


def _address(memory: memoryview) -> int:
    """Where bytes lie that may be read-only, which ctypes alone doesn't tell."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)
