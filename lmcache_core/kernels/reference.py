"""Gather and scatter between paged KV and frame payloads with plain torch operations, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.kernels.layout import KVContent, Plane, block_planes, pair_planes

if TYPE_CHECKING:
    from torch import Tensor


class PagedKV:
    """An engine's KV tensors, read and written in place by token slot.

    A payload is one flat memoryview a layer (writable, to gather) of exactly
    `heads x tokens x content_nbytes` bytes: `[heads, tokens, 2 x dim]`, K then V. `slots` says where token
    i lies: a range of consecutive slots (copied by slices), or a 1-D int32 or int64 tensor of them. Nothing
    larger than an index is allocated.
    The tensors' memory must stay what it is while this lives: build one anew when a cache grows.
    One object may be used by several threads as far as their slots and payloads don't overlap.
    """

    def __init__(self, layers: Sequence[Sequence[Plane]]) -> None:
        first = layers[0][0].tensor
        self._layers = layers
        self._dtype = first.dtype
        self.num_layers = len(layers)
        self.num_heads, num_blocks, self._block_slots, _ = first.shape
        self.num_slots = num_blocks * self._block_slots
        self._width = sum(plane.tensor.shape[3] for plane in layers[0])
        content = KVContent(str(first.dtype).removeprefix("torch."), self._width // 2)
        self.content_format = content.text
        self.content_nbytes = content.nbytes

    @classmethod
    def from_pairs(
        cls, keys: Sequence[Tensor], values: Sequence[Tensor], *, axes: str = "bhtd", row: int = 0
    ) -> PagedKV:
        """One batch row of separate K and V tensors a layer, as Transformers keeps them.

        With left padding, the token at position p of a row lies in slot `pad + p`.

        Raises:
            UnsupportedModel: shapes, dtypes, devices or strides that can't be said, with the numbers.
            ValueError: `axes` is no permutation of `bhtd`, `row` is not in the batch, no layer.
        """
        import torch

        with torch.inference_mode():
            return cls(pair_planes(keys, values, axes, row))

    @classmethod
    def from_blocks(cls, layers: Sequence[Tensor], *, axes: str) -> PagedKV:
        """One tensor of blocks a layer: axes `cnshd`, `ncshd`, `nhse`, `nshe` or any other order of those.

        Raises:
            UnsupportedModel: shapes, dtypes, devices or strides that can't be said, with the numbers.
            ValueError: `axes` is none of the above, no layer.
        """
        import torch

        with torch.inference_mode():
            return cls(block_planes(layers, axes))

    def gather(self, slots: range | Tensor, payload: Sequence[memoryview]) -> None:
        """Copies the KV in `slots[i]` to token i of `payload`, for all layers.

        Raises:
            ValueError: slots or payload don't fit; nothing was written.
        """
        self._move(slots, payload, gathering=True)

    def scatter(self, slots: range | Tensor, payload: Sequence[memoryview]) -> None:
        """Copies token i of `payload` to `slots[i]`, for all layers. No other slot is touched.

        Raises:
            ValueError: slots or payload don't fit, or a slot is named twice; nothing was written.
        """
        self._move(slots, payload, gathering=False)

    def _move(self, slots: range | Tensor, payload: Sequence[memoryview], *, gathering: bool) -> None:
        import torch

        # Inference mode: an engine's KV may be an inference tensor, or one that requires grad.
        with torch.inference_mode():
            if isinstance(slots, range):
                pieces = self._pieces(slots)
                self._check_payload(payload, len(slots), written=gathering)
                strides = (len(slots) * self._width, self._block_slots * self._width, self._width, 1)
                for plane, segment in self._planes(payload):
                    for token, blocks, places in pieces:
                        paged = plane.tensor[:, blocks, places]
                        piece = segment.as_strided(paged.shape, strides, token * self._width + plane.column)
                        if gathering:
                            piece.copy_(paged)
                        else:
                            paged.copy_(piece)
                return
            self._check_index(slots, unique=not gathering)
            self._check_payload(payload, len(slots), written=gathering)
            rows_of: dict[tuple[int, int, int], Tensor] = {}  # layers of one shape nearly always share theirs
            for plane, segment in self._planes(payload):
                plane_strides = plane.row_strides()
                if plane_strides not in rows_of:
                    rows_of[plane_strides] = self._rows(slots, plane_strides)
                rows, table = rows_of[plane_strides], plane.table()
                piece = segment.as_strided((len(rows), table.shape[1]), (self._width, 1), plane.column)
                if gathering:
                    torch.index_select(table, 0, rows, out=piece)
                else:
                    table.index_copy_(0, rows, piece)

    def _planes(self, payload: Sequence[memoryview]) -> Iterator[tuple[Plane, Tensor]]:
        """Each plane with the elements of its layer's payload segment, flat, not copied."""
        import torch

        for planes, memory in zip(self._layers, payload, strict=True):
            segment = torch.frombuffer(_writable(memory), dtype=self._dtype)
            for plane in planes:
                yield plane, segment

    def _pieces(self, slots: range) -> list[tuple[int, slice, slice]]:
        """At most three (first token, blocks, places in a block): one's end, whole ones, one's start."""
        if slots.step != 1 or not 0 <= slots.start < slots.stop <= self.num_slots:
            raise ValueError(f"{slots} is not a range of consecutive slots among {self.num_slots}")
        pieces = []
        slot = slots.start
        while slot < slots.stop:
            block, place = divmod(slot, self._block_slots)
            blocks = 1 if place else max(1, (slots.stop - slot) // self._block_slots)
            places = min(self._block_slots - place, slots.stop - slot)
            pieces.append((slot - slots.start, slice(block, block + blocks), slice(place, place + places)))
            slot += blocks * places
        return pieces

    def _rows(self, slots: Tensor, strides: tuple[int, int, int]) -> Tensor:
        """Where each head and token lies in a plane's table: `[heads x tokens]`."""
        import torch

        head_rows, block_rows, place_rows = strides
        slots = slots.long()
        rows = slots // self._block_slots * block_rows + slots % self._block_slots * place_rows
        return (torch.arange(self.num_heads).unsqueeze(1) * head_rows + rows).flatten()

    def _check_index(self, slots: Tensor, *, unique: bool) -> None:
        if str(slots.dtype) not in ("torch.int32", "torch.int64") or slots.dim() != 1 or not slots.numel():
            raise ValueError(f"slots must be 1-D int32 or int64, not {slots.dtype} {list(slots.shape)}")
        if slots.device.type != "cpu":
            raise ValueError(f"slots are on {slots.device}, the KV on cpu")
        low, high = (int(bound) for bound in slots.aminmax())
        if low < 0 or high >= self.num_slots:
            raise ValueError(f"slots {low} to {high} are not all among {self.num_slots}")
        if unique and len(set(slots.tolist())) != len(slots):
            raise ValueError("a slot is named twice")

    def _check_payload(self, payload: Sequence[memoryview], num_tokens: int, *, written: bool) -> None:
        nbytes = self.num_heads * num_tokens * self.content_nbytes
        if len(payload) != self.num_layers:
            raise ValueError(f"{len(payload)} payload segments for {self.num_layers} layers")
        for layer, memory in enumerate(payload):
            if memory.nbytes != nbytes or (written and memory.readonly) or not memory.c_contiguous:
                wanted = "contiguous writable bytes" if written else "contiguous bytes"
                raise ValueError(
                    f"payload segment {layer} must be {nbytes} {wanted}, not {memory.nbytes} "
                    f"(read-only: {memory.readonly})"
                )


def _writable(memory: memoryview) -> memoryview | ctypes.Array[ctypes.c_ubyte]:
    """The same bytes as torch wants them: it has no tensors that may only be read, and warns of it.

    Valid as long as `memory` is; nothing here writes what was given to be read.
    """
    if not memory.readonly:
        return memory
    import numpy as np

    return (ctypes.c_ubyte * memory.nbytes).from_address(np.frombuffer(memory, np.uint8).ctypes.data)
