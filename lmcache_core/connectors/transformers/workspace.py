"""The memory a running request's KV lies in: reused between requests, written in place by the model."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from lmcache_core.kernels import PagedKV


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What every layer's K and V look like: `[rows, num_heads, tokens, dim]` of `dtype`."""

    num_layers: int
    num_heads: int
    dim: int
    dtype: torch.dtype

    def plane_numel(self, rows: int, capacity_tokens: int) -> int:
        return rows * self.num_heads * capacity_tokens * self.dim


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A `DynamicLayer` that grows inside given memory, so that no step copies what is already there.

    `keys` and `values` are views of the first tokens of the room. Whatever replaces them (beam
    reordering, more tokens than there is room for) falls back to the parent's way, and `in_place` is
    False from then on.
    """

    def __init__(self, keys_room: Tensor, values_room: Tensor, num_tokens: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = keys_room.device
        self._room = (keys_room, values_room)
        self._hold(num_tokens)
        self.is_initialized = True

    @property
    def in_place(self) -> bool:
        return self.keys is self._held[0] and self.values is self._held[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys_room, values_room = self._room
        first = self.get_seq_length()
        end = first + key_states.shape[2]
        if not self.in_place or end > keys_room.shape[2] or key_states.shape[0] != keys_room.shape[0]:
            return super().update(key_states, value_states, *args, **kwargs)
        keys_room[:, :, first:end].copy_(key_states)
        values_room[:, :, first:end].copy_(value_states)
        return self._hold(end)

    def crop(self, tokens_to_remove: int) -> None:
        in_place = self.in_place
        super().crop(tokens_to_remove)
        if in_place:
            self._held = (self.keys, self.values)

    def _hold(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        keys_room, values_room = self._room
        self._held = (keys_room[:, :, :num_tokens], values_room[:, :, :num_tokens])
        self.keys, self.values = self._held
        return self._held


class RowKV:
    """One row's KV by token position: what the engine gathers from and scatters to.

    `first_slot` is the row's padding: token p lies in slot `first_slot + p` of every layer.
    """

    def __init__(self, planes: Sequence[tuple[Tensor, Tensor]], row: int, first_slot: int) -> None:
        self._kv = PagedKV.from_pairs(
            [keys for keys, _ in planes], [values for _, values in planes], axes="bhtd", row=row
        )
        self._first_slot = first_slot

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        self._kv.gather(self._slots(first_token, num_tokens), payload)

    def scatter(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        self._kv.scatter(self._slots(first_token, num_tokens), payload)

    def _slots(self, first_token: int, num_tokens: int) -> range:
        start = self._first_slot + first_token
        return range(start, start + num_tokens)


class Batch:
    """KV memory of left-padded rows: `planes[layer]` are K and V, `[rows, heads, capacity, dim]`.

    Row r's tokens start at slot `padding[r]`; all rows end at the same slot. Valid until the workspace
    gets its memory back.
    """

    def __init__(self, planes: Sequence[tuple[Tensor, Tensor]], num_tokens: Sequence[int]) -> None:
        self.planes = planes
        self.length = max(num_tokens)
        self.padding = [self.length - count for count in num_tokens]
        for row, pad in enumerate(self.padding):
            for keys, values in planes if pad else ():
                # Masked, but a NaN left here by an earlier request would spoil a sum even at weight 0.
                keys[row, :, :pad].zero_()
                values[row, :, :pad].zero_()

    def row(self, row: int) -> RowKV:
        return RowKV(self.planes, row, self.padding[row])

    def row_layers(self, row: int, num_tokens: int) -> list[RoomyLayer]:
        """Layers of a batch of one: this row, without its padding, with its first tokens filled in."""
        here = slice(row, row + 1)
        pad = self.padding[row]
        return [RoomyLayer(k[here, :, pad:], v[here, :, pad:], num_tokens) for k, v in self.planes]

    def mask(self, num_slots: int) -> Tensor:
        """`[rows, num_slots]`, 0 on padding."""
        mask = torch.ones((len(self.padding), num_slots), dtype=torch.int64)
        for row, pad in enumerate(self.padding):
            mask[row, :pad] = 0
        return mask

    def layers(self, num_slots: int) -> list[RoomyLayer]:
        """Layers of the whole batch with its first slots (padding included) filled in."""
        return [RoomyLayer(keys, values, num_slots) for keys, values in self.planes]


class Workspace:
    """Lends KV memory and keeps the largest mapping for the next request.

    Fresh memory costs a page fault every 4 KiB, more than the copy that fills it. Thread-safe: a second
    request at the same time gets memory of its own.
    """

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._lock = threading.Lock()  # guards _idle
        self._idle: Tensor | None = None

    @contextmanager
    def batch(self, num_tokens: Sequence[int], room_tokens: int) -> Iterator[Batch]:
        """Memory for rows of these lengths and `room_tokens` more each; its contents are unspecified."""
        shape = self._shape
        rows, capacity = len(num_tokens), max(num_tokens) + room_tokens
        numel = shape.plane_numel(rows, capacity)
        memory = self._take(2 * shape.num_layers * numel * shape.dtype.itemsize)
        elements = memory.view(shape.dtype)[: 2 * shape.num_layers * numel]
        planes = elements.view(shape.num_layers, 2, rows, shape.num_heads, capacity, shape.dim)
        try:
            yield Batch([(keys, values) for keys, values in planes], num_tokens)
        finally:
            self._give_back(memory)

    def close(self) -> None:
        with self._lock:
            self._idle = None

    def _take(self, nbytes: int) -> Tensor:
        with self._lock:
            memory, self._idle = self._idle, None
        if memory is not None and memory.numel() >= nbytes:
            return memory
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def _give_back(self, memory: Tensor) -> None:
        with self._lock:
            if self._idle is None or self._idle.numel() < memory.numel():
                self._idle = memory
