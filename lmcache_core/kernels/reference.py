"""Gather and scatter between paged KV and frame payloads with plain torch operations, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels.checks import address_of, bad_segment, check_layers, check_slots, snapshot
from lmcache_core.kernels.layout import PagedLayout, Plane
from lmcache_core.kernels.overlap import Segment, check_segments

if TYPE_CHECKING:
    from torch import Tensor, dtype


class ReferenceMover:
    """What runs where the compiled kernels are not installed: correct, and slower where rows are short.

    Elements are moved as integers of their size: bits survive, whatever they mean as numbers. Planes are
    tables of rows to it: every stride must be a multiple of a row's width.

    Raises:
        UnsupportedModel: a stride is not.
    """

    def __init__(self, layout: PagedLayout) -> None:
        import torch

        for number, planes in enumerate(layout.layers):
            for plane in planes:
                _check_rows(number, plane.tensor)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[layout.content.item_nbytes]
        self._layout = layout
        self._extents = layout.extents()
        self._bits = bits
        self._layers = [
            [Plane(plane.tensor.view(bits), plane.column) for plane in planes] for planes in layout.layers
        ]
        self._width = sum(plane.tensor.shape[3] for plane in layout.layers[0])

    def move(self, frames: Sequence[tuple[range | Tensor, Sequence[memoryview]]], *, gathering: bool) -> None:
        import torch

        # Inference mode: an engine's KV may be an inference tensor, or one that requires grad.
        with torch.inference_mode():
            frames = snapshot(frames)
            seen: set[int] | None = None if gathering else set()
            segments: list[Segment] = []
            for frame, (slots, payload) in enumerate(frames):
                check_slots(frame, slots, self._layout.num_slots, seen)
                segments += self._check_payload(frame, payload, len(slots), written=gathering)
            check_segments(segments, self._extents, written=gathering)
            for slots, payload in frames:
                if isinstance(slots, range):
                    self._move_range(slots, payload, gathering=gathering)
                else:
                    self._move_index(slots.long(), payload, gathering=gathering)

    def _move_range(self, slots: range, payload: Sequence[memoryview], *, gathering: bool) -> None:
        """By slices: at most three copies a plane."""
        pieces = self._pieces(slots)
        strides = (len(slots) * self._width, self._layout.block_slots * self._width, self._width, 1)
        for plane, segment in self._planes(payload):
            for token, blocks, places in pieces:
                paged = plane.tensor[:, blocks, places]
                piece = segment.as_strided(paged.shape, strides, token * self._width + plane.column)
                if gathering:
                    piece.copy_(paged)
                else:
                    paged.copy_(piece)

    def _move_index(self, slots: Tensor, payload: Sequence[memoryview], *, gathering: bool) -> None:
        """By rows of tables: one operation a plane, two where there are holes."""
        import torch

        num_tokens = len(slots)
        tokens: Tensor | None = None
        if bool((slots < 0).any()):
            tokens = (slots >= 0).nonzero().flatten()
            slots = slots[tokens]
            if not len(slots):
                return
            tokens = (torch.arange(self._layout.num_heads).unsqueeze(1) * num_tokens + tokens).flatten()
        rows_of: dict[tuple[int, int, int], Tensor] = {}  # layers of one shape nearly always share theirs
        for plane, segment in self._planes(payload):
            plane_strides = plane.row_strides()
            if plane_strides not in rows_of:
                rows_of[plane_strides] = self._rows(slots, plane_strides)
            rows, table = rows_of[plane_strides], plane.table()
            size = (self._layout.num_heads * num_tokens, table.shape[1])
            packed = segment.as_strided(size, (self._width, 1), plane.column)
            if tokens is None:
                if gathering:
                    torch.index_select(table, 0, rows, out=packed)
                else:
                    table.index_copy_(0, rows, packed)
            elif gathering:
                packed.index_copy_(0, tokens, table.index_select(0, rows))
            else:
                table.index_copy_(0, rows, packed.index_select(0, tokens))

    def _planes(self, payload: Sequence[memoryview]) -> Iterator[tuple[Plane, Tensor]]:
        """Each plane with the elements of its layer's payload segment, flat, not copied."""
        for planes, memory in zip(self._layers, payload, strict=True):
            segment = bytes_of(memory, self._bits)
            for plane in planes:
                yield plane, segment

    def _pieces(self, slots: range) -> list[tuple[int, slice, slice]]:
        """At most three (first token, blocks, places in a block): one's end, whole ones, one's start."""
        block_slots = self._layout.block_slots
        pieces = []
        slot = slots.start
        while slot < slots.stop:
            block, place = divmod(slot, block_slots)
            blocks = 1 if place else max(1, (slots.stop - slot) // block_slots)
            places = min(block_slots - place, slots.stop - slot)
            pieces.append((slot - slots.start, slice(block, block + blocks), slice(place, place + places)))
            slot += blocks * places
        return pieces

    def _rows(self, slots: Tensor, strides: tuple[int, int, int]) -> Tensor:
        """Where each head and token lies in a plane's table: `[heads x tokens]`."""
        import torch

        head_rows, block_rows, place_rows = strides
        block_slots = self._layout.block_slots
        rows = slots // block_slots * block_rows + slots % block_slots * place_rows
        return (torch.arange(self._layout.num_heads).unsqueeze(1) * head_rows + rows).flatten()

    def _check_payload(
        self, frame: int, payload: Sequence[memoryview], num_tokens: int, *, written: bool
    ) -> list[Segment]:
        nbytes = self._layout.num_heads * num_tokens * self._layout.content.nbytes
        check_layers(frame, payload, self._layout.num_layers)
        for layer, memory in enumerate(payload):
            if memory.nbytes != nbytes or (written and memory.readonly) or not memory.c_contiguous:
                raise bad_segment(frame, layer, nbytes, memory, written=written)
        return [Segment(address_of(memory), nbytes, frame, layer) for layer, memory in enumerate(payload)]


def _check_rows(layer: int, plane: Tensor) -> None:
    width = plane.shape[3]
    for count, stride in zip(plane.shape[:3], plane.stride(), strict=False):
        if count > 1 and stride % width:
            raise UnsupportedModel(
                f"layer {layer}: stride {stride} is not a multiple of a row of {width} elements: that needs "
                f"lmcache-core-kernels; [heads, blocks, slots, width] is {list(plane.shape)}, its strides "
                f"{plane.stride()}"
            )


def bytes_of(memory: memoryview, element: dtype) -> Tensor:
    """A flat tensor over the same bytes, not copied. Valid as long as `memory` is.

    torch has no tensors that may only be read, and warns of it: nothing here writes what was given so.
    """
    import torch

    if not memory.readonly:
        return torch.frombuffer(memory, dtype=element)
    array = (ctypes.c_ubyte * memory.nbytes).from_address(address_of(memory))
    return torch.frombuffer(array, dtype=element)
