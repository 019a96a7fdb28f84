"""Gather and scatter between paged KV and frame payloads with plain torch operations, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.kernels.layout import KVContent, Plane, block_planes, pair_planes

if TYPE_CHECKING:
    from torch import Tensor


class PagedKV:
    """An engine's KV tensors, read and written in place by token slot.

    A payload is one writable flat memoryview a layer of exactly `heads x tokens x content_nbytes` bytes:
    `[heads, tokens, 2 x dim]`, K then V. `slots` says where token i lies: a range of consecutive slots
    (copied by slices), or a 1-D int32 or int64 tensor of them. Nothing larger than an index is allocated.
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
        width = sum(plane.tensor.shape[3] for plane in layers[0])
        content = KVContent(str(first.dtype).removeprefix("torch."), width // 2)
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
                self._check_payload(payload, len(slots))
                for plane, packed in self._planes(payload, len(slots)):
                    for tokens, blocks, places in pieces:
                        paged = plane.tensor[:, blocks, places]
                        piece = packed[:, tokens].view(paged.shape)
                        if gathering:
                            piece.copy_(paged)
                        else:
                            paged.copy_(piece)
                return
            self._check_index(slots, unique=not gathering)
            self._check_payload(payload, len(slots))
            rows_of: dict[tuple[int, int, int], Tensor] = {}  # layers of one shape nearly always share theirs
            for plane, packed in self._planes(payload, len(slots)):
                strides = plane.row_strides()
                if strides not in rows_of:
                    rows_of[strides] = self._rows(slots, strides)
                if gathering:
                    torch.index_select(plane.table(), 0, rows_of[strides], out=packed.flatten(0, 1))
                else:
                    plane.table().index_copy_(0, rows_of[strides], packed.flatten(0, 1))

    def _planes(self, payload: Sequence[memoryview], num_tokens: int) -> Iterator[tuple[Plane, Tensor]]:
        """Each plane with its elements of the payload: `[heads, tokens, width]`, a view."""
        import torch

        for planes, memory in zip(self._layers, payload, strict=True):
            segment = torch.frombuffer(memory, dtype=self._dtype).view(self.num_heads, num_tokens, -1)
            for plane in planes:
                yield plane, segment[:, :, plane.columns]

    def _pieces(self, slots: range) -> list[tuple[slice, slice, slice]]:
        """At most three (tokens, blocks, places in a block): one's end, whole ones, one's start."""
        if slots.step != 1 or not 0 <= slots.start < slots.stop <= self.num_slots:
            raise ValueError(f"{slots} is not a range of consecutive slots among {self.num_slots}")
        pieces = []
        slot = slots.start
        while slot < slots.stop:
            block, place = divmod(slot, self._block_slots)
            blocks = 1 if place else max(1, (slots.stop - slot) // self._block_slots)
            places = min(self._block_slots - place, slots.stop - slot)
            token = slot - slots.start
            slot += blocks * places
            pieces.append(
                (
                    slice(token, slot - slots.start),
                    slice(block, block + blocks),
                    slice(place, place + places),
                )
            )
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

    def _check_payload(self, payload: Sequence[memoryview], num_tokens: int) -> None:
        nbytes = self.num_heads * num_tokens * self.content_nbytes
        if len(payload) != self.num_layers:
            raise ValueError(f"{len(payload)} payload segments for {self.num_layers} layers")
        for layer, memory in enumerate(payload):
            if memory.nbytes != nbytes or memory.readonly or not memory.c_contiguous:
                raise ValueError(
                    f"payload segment {layer} must be {nbytes} contiguous writable bytes, "
                    f"not {memory.nbytes} (read-only: {memory.readonly})"
                )
