"""What shares memory and must not: planes of an engine's KV, segments of payloads, one with the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels.checks import overlap

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """A plane as few rows: those that follow each other without a gap are one.

    `axes` are (count, stride), the largest stride first; what is inside a stride never reaches the next one.
    """

    base: int
    nbytes: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.base + self.nbytes + sum((count - 1) * stride for count, stride in self.axes)

    def meets(self, other: Rows) -> bool:
        """Whether a byte is in both, whose strides are the same."""
        return self._meets(other.base - self.base, self.axes, other.nbytes)

    def _meets(self, distance: int, axes: tuple[tuple[int, int], ...], other_nbytes: int) -> bool:
        if not axes:
            return -other_nbytes < distance < self.nbytes
        (count, stride), inner = axes[0], axes[1:]
        steps, rest = divmod(distance, stride)
        near = ((steps, rest), (steps + 1, rest - stride))  # what is inside a stride reaches no farther
        return any(abs(k) < count and self._meets(left, inner, other_nbytes) for k, left in near)


def rows_of(plane: Tensor) -> Rows:
    """Of `[heads, blocks, slots, width]`, as `layout` checks them."""
    item = plane.element_size()
    nbytes = plane.shape[3] * item
    axes: list[tuple[int, int]] = []
    outer = [(n, s * item) for n, s in zip(plane.shape[:3], plane.stride(), strict=False) if n > 1]
    for count, stride in sorted(outer, key=lambda axis: axis[1]):
        if stride == nbytes and not axes:
            nbytes *= count
        else:
            axes.append((count, stride))
    return Rows(plane.data_ptr(), nbytes, tuple(reversed(axes)))


def check_planes(layers: Sequence[Sequence[Rows]]) -> None:
    """Layers may be the same memory altogether, as where an engine shares KV between them.

    Raises:
        UnsupportedModel: planes overlap otherwise, or lie among each other in ways that can't be told apart.
    """
    first_of: dict[tuple[Rows, ...], int] = {}
    for layer, planes in enumerate(layers):
        first_of.setdefault(tuple(planes), layer)
    table = [(rows, layer, i) for planes, layer in first_of.items() for i, rows in enumerate(planes)]
    table.sort(key=lambda entry: entry[0].base)
    for at, (rows, layer, plane) in enumerate(table):
        for other, other_layer, other_plane in table[at + 1 :]:
            if other.base >= rows.end:
                break
            known = [stride for _, stride in rows.axes] == [stride for _, stride in other.axes]
            if not known or rows.meets(other):
                raise UnsupportedModel(
                    f"plane {plane} of layer {layer} and plane {other_plane} of layer {other_layer} "
                    f"{'overlap' if known else 'lie among each other, with different strides'}: addresses "
                    f"{rows.base:#x} to {rows.end:#x} and {other.base:#x} to {other.end:#x}, rows of "
                    f"{rows.nbytes} and {other.nbytes} bytes, (count, stride) {rows.axes} and {other.axes}"
                )


@dataclass(frozen=True, slots=True)
class Segment:
    address: int
    nbytes: int
    frame: int
    layer: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def check_segments(segments: Sequence[Segment], engine: Sequence[tuple[int, int]], *, written: bool) -> None:
    """`engine` are (first byte, end) of its planes, whose gaps are its own too.

    Raises:
        ValueError: a segment overlaps the engine's memory or, where they are written, another one.
    """
    ordered = sorted(segments, key=lambda segment: segment.address)
    reach = list(accumulate((segment.end for segment in ordered), max))
    if written:
        for before, segment in zip(reach, ordered[1:], strict=False):
            if segment.address < before:
                raise overlap(segment.frame, segment.layer, engine=False)
    for first, end in engine:
        at = bisect_right(reach, first)  # of the segments that end behind `first`, the one that begins first
        if at < len(ordered) and ordered[at].address < end:
            raise overlap(ordered[at].frame, ordered[at].layer, engine=True)
