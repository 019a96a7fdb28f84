"""Gather and scatter that narrow bfloat16 to float8 with scales, and widen it again, by torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.kernels.layout import Plane
from lmcache_core.kernels.reference import ReferenceMover, bytes_of

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""
SMALLEST_SCALE = 2.0**-126


class NarrowingMover(ReferenceMover):
    """As its parent, with content of `dim` float8 of K, `dim` of V, float32 scales of K and of V."""

    def _move_range(self, slots: range, payload: Sequence[memoryview], *, gathering: bool) -> None:
        import torch

        self._move_index(torch.arange(slots.start, slots.stop), payload, gathering=gathering)

    def _move_index(self, slots: Tensor, payload: Sequence[memoryview], *, gathering: bool) -> None:
        import torch

        content = self._layout.content
        tokens = (slots >= 0).nonzero().flatten()
        places = torch.arange(self._layout.num_heads).unsqueeze(1) * len(slots) + tokens
        places, slots = places.flatten(), slots[tokens]
        for planes, memory in zip(self._layers, payload, strict=True):
            packed = bytes_of(memory, torch.uint8).view(-1, content.nbytes)
            for kind, (plane, column) in enumerate(self._halves(planes)):
                rows, table = self._rows(slots, plane.row_strides()), plane.table()
                here = slice(kind * content.dim, (kind + 1) * content.dim)
                scale_at = slice(2 * content.dim + 4 * kind, 2 * content.dim + 4 * kind + 4)
                columns = slice(column, column + content.dim)
                if gathering:
                    narrowed, scales = narrow(table[rows, columns].view(torch.bfloat16))
                    packed[places, here] = narrowed
                    packed[places, scale_at] = scales
                else:
                    widened = widen(packed[places, here], packed[places, scale_at])
                    table[rows, columns] = widened.view(table.dtype)

    def _halves(self, planes: Sequence[Plane]) -> list[tuple[Plane, int]]:
        """K's plane and V's, with their first column in it."""
        if len(planes) == 2:
            return [(planes[0], 0), (planes[1], 0)]
        return [(planes[0], 0), (planes[0], self._layout.content.dim)]


def narrow(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, dim] bfloat16` as bytes of float8 `[rows, dim]` and of float32 scales `[rows, 4]`."""
    import torch

    values = rows.float()
    most = values.abs().amax(dim=1, keepdim=True)
    finite = most.isfinite()
    scales = torch.where(finite, (most / LARGEST).clamp_min(SMALLEST_SCALE), 1.0)
    narrowed = torch.where(finite, values / scales, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)
    narrowed = torch.where(finite, narrowed, 0x7F)  # one NaN of the two
    return narrowed, scales.view(torch.uint8)


def widen(narrowed: Tensor, scales: Tensor) -> Tensor:
    import torch

    values = narrowed.contiguous().view(torch.float8_e4m3fn).float()
    widened = values * scales.contiguous().view(torch.float32)
    return widened.bfloat16().masked_fill(widened.isnan(), torch.nan)  # one NaN of all
