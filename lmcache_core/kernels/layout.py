"""An engine's KV as data: for each layer one or two planes, each a base address and strides.

An axes string names the dimensions of the engine's tensors, outermost first:

    b  batch row             n  block                       c  K, then V (size 2)
    h  KV head               s  slot inside a block         e  K and V of one token and head, adjacent
    t  token slot            d  elements of K (or of V)        (2 x d elements)

A token's slot is its position in `t`, or block x block slots + place in the block. Without `c`, `e` and `h`
the `d` elements are one latent for all heads (MLA), which has no V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels.checks import bytes_missing
from lmcache_core.kernels.overlap import check_planes, rows_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_PAIR_AXES = (frozenset("bhtd"), frozenset("htd"))
_BLOCK_AXES = (frozenset("cnshd"), frozenset("nshe"), frozenset("nsd"))


@dataclass(frozen=True, slots=True)
class KVContent:
    """The bytes of one token and head: `dim` elements of K, then `dim` of V, little-endian `dtype`.

    Its text is the content format of a part: `kv float32 64`. A segment in it is `[heads, tokens, 2 x dim]`,
    row-major and without gaps (docs/adr/0003-payload-order.md). A latent has `dim` elements and no V:
    `mla bfloat16 576`, one head.

    Narrowed content, `kv float8_e4m3fn+scale 128`, is made of bfloat16: `dim` float8 of K, `dim` of V, and
    the float32 scales of K and of V (docs/adr/0007-compiled-kernels.md). It loses precision.

    Raises:
        UnsupportedModel: a dtype other than those of `_ITEM_NBYTES`; narrowing what isn't K and V in
            bfloat16.
        ValueError: `dim` is not positive.
    """

    dtype: str
    dim: int
    latent: bool = False
    narrow: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_NBYTES:
            hint = "; give it as what it holds: tensor.view(torch.float8_e4m3fn)" * (self.dtype == "uint8")
            raise UnsupportedModel(f"KV of dtype {self.dtype}; supported are {', '.join(_ITEM_NBYTES)}{hint}")
        if self.dim < 1:
            raise ValueError(f"a head has at least one element, not {self.dim}")
        if self.narrow and (self.latent or self.dtype != "bfloat16"):
            raise UnsupportedModel(f"only K and V in bfloat16 can be narrowed to float8, not {self.dtype}")

    @property
    def text(self) -> str:
        if self.narrow:
            return f"kv float8_e4m3fn+scale {self.dim}"
        return f"{'mla' if self.latent else 'kv'} {self.dtype} {self.dim}"

    @property
    def item_nbytes(self) -> int:
        """Of an element in the engine's memory."""
        return _ITEM_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Of one token and head in a payload."""
        if self.narrow:
            return 2 * self.dim + 8
        return (1 if self.latent else 2) * self.dim * self.item_nbytes


@dataclass(frozen=True, slots=True)
class Plane:
    """A layer's K, its V, or both side by side: `[heads, blocks, block slots, width]`, a view, not a copy.

    It fills the elements from `column` on of each token and head in the payload. Rows of `width` elements
    are contiguous, and no two overlap.
    """

    tensor: Tensor
    column: int

    def table(self) -> Tensor:
        """The plane's memory as rows `[rows, width]`, starting at head 0, slot 0.

        For planes whose strides are multiples of `width`; the compiled kernels need no such thing.
        """
        width = self.tensor.shape[3]
        last = sum((n - 1) * s for n, s in zip(self.tensor.shape[:3], self.row_strides(), strict=True))
        return self.tensor.as_strided((last + 1, width), (width, 1), self.tensor.storage_offset())

    def row_strides(self) -> tuple[int, int, int]:
        """Rows of `table` from one head, block and block slot to the next."""
        width = self.tensor.shape[3]
        heads, blocks, slots, _ = self.tensor.stride()
        return heads // width, blocks // width, slots // width


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Every layer's planes. The tensors' memory lives as long as this does."""

    layers: Sequence[Sequence[Plane]]
    content: KVContent

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0][0].tensor.shape[0]

    @property
    def row_nbytes(self) -> int:
        """Of one token and head in a plane."""
        return self.layers[0][0].tensor.shape[3] * self.content.item_nbytes

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].tensor.device

    def extents(self) -> list[tuple[int, int]]:
        """First byte and end of each plane."""
        rows = [rows_of(plane.tensor) for planes in self.layers for plane in planes]
        return [(plane.base, plane.end) for plane in rows]

    @property
    def block_slots(self) -> int:
        return self.layers[0][0].tensor.shape[2]

    @property
    def num_slots(self) -> int:
        return self.layers[0][0].tensor.shape[1] * self.block_slots


def pairs_layout(keys: Sequence[Tensor], values: Sequence[Tensor], axes: str, row: int) -> PagedLayout:
    """One batch row of separate K and V tensors, a layer each.

    Raises:
        UnsupportedModel: the tensors don't fit `axes`, each other, or what a plane must be.
        ValueError: `axes` or `row` make no sense, or there is no layer.
    """
    if len(set(axes)) != len(axes) or frozenset(axes) not in _PAIR_AXES:
        raise ValueError(f"axes {axes!r} are not a permutation of 'bhtd' or 'htd'")
    if len(keys) != len(values):
        raise UnsupportedModel(f"{len(keys)} layers of K, {len(values)} of V")
    _check_alike([*keys, *values], axes, num_keys=len(keys))
    if "b" not in axes:
        axes = f"b{axes}"
        keys, values = ([tensor.unsqueeze(0) for tensor in half] for half in (keys, values))
    batch = keys[0].shape[axes.index("b")]
    if not 0 <= row < batch:
        raise ValueError(f"row {row} of a batch of {batch}")
    order = [axes.index(axis) for axis in "bhtd"]
    dim = keys[0].shape[axes.index("d")]

    def plane(tensor: Tensor, layer: int, column: int) -> Plane:
        return _plane(tensor.permute(order)[row].unsqueeze(1), layer, column)

    return _layout(
        [
            [plane(k, layer, 0), plane(v, layer, dim)]
            for layer, (k, v) in enumerate(zip(keys, values, strict=True))
        ],
        KVContent(_dtype_name(keys[0]), dim),
    )


def blocks_layout(layers: Sequence[Tensor], axes: str) -> PagedLayout:
    """One block tensor a layer.

    Raises:
        UnsupportedModel: the tensors don't fit `axes`, each other, or what a plane must be.
        ValueError: `axes` make no sense, or there is no layer.
    """
    if len(set(axes)) != len(axes) or frozenset(axes) not in _BLOCK_AXES:
        raise ValueError(f"axes {axes!r} are not a permutation of 'cnshd', 'nshe' or 'nsd'")
    _check_alike(layers, axes)
    shape = dict(zip(axes, layers[0].shape, strict=True))
    dtype = _dtype_name(layers[0])
    if "e" in axes:
        if shape["e"] % 2:
            raise UnsupportedModel(f"K and V can't share {shape['e']} elements equally")
        order = [axes.index(axis) for axis in "hnse"]
        planes = [[_plane(tensor.permute(order), layer, 0)] for layer, tensor in enumerate(layers)]
        return _layout(planes, KVContent(dtype, shape["e"] // 2))
    if "h" not in axes:
        order = [axes.index(axis) for axis in "nsd"]
        planes = [
            [_plane(tensor.permute(order).unsqueeze(0), layer, 0)] for layer, tensor in enumerate(layers)
        ]
        return _layout(planes, KVContent(dtype, shape["d"], latent=True))
    if shape["c"] != 2:
        raise UnsupportedModel(
            f"the K/V axis has {shape['c']} entries, not 2, in shape {_numbers(layers[0])}"
        )
    order = [axes.index(axis) for axis in "chnsd"]
    planes = [
        [_plane(tensor.permute(order)[c], layer, c * shape["d"]) for c in range(2)]
        for layer, tensor in enumerate(layers)
    ]
    return _layout(planes, KVContent(dtype, shape["d"]))


def _layout(layers: Sequence[Sequence[Plane]], content: KVContent) -> PagedLayout:
    if layers[0][0].tensor.device.type != "meta":  # it has no memory
        check_planes([[rows_of(plane.tensor) for plane in planes] for planes in layers])
    return PagedLayout(layers, content)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_memory(index: int, tensor: Tensor) -> None:
    """Raises `UnsupportedModel` where there is no memory that the tensor's strides describe."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModel(f"tensor {index} is no tensor but {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise UnsupportedModel(f"tensor {index} is {tensor.layout}, not dense")
    missing = bytes_missing(tensor)
    if missing:
        raise UnsupportedModel(f"tensor {index} {missing}")


def _check_alike(tensors: Sequence[Tensor], axes: str, *, num_keys: int | None = None) -> None:
    """The first `num_keys` of them are K, the others V."""
    if not tensors:
        raise ValueError("no layer given")
    for index, tensor in enumerate(tensors):
        check_memory(index, tensor)
    first = tensors[0]
    if first.dim() != len(axes):
        raise UnsupportedModel(
            f"shape {_numbers(first)} has {first.dim()} dimensions, axes {axes!r} name {len(axes)}"
        )
    if first.numel() == 0:
        raise UnsupportedModel(f"a KV tensor of shape {_numbers(first)} holds nothing")
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            hint = "; K and V must be alike, in head size too" * (index == num_keys)
            raise UnsupportedModel(
                f"tensor {index} has shape {_numbers(tensor)}, the first {_numbers(first)}{hint}"
            )
        if tensor.dtype != first.dtype:
            raise UnsupportedModel(f"tensor {index} has dtype {tensor.dtype}, the first {first.dtype}")
        if tensor.device != first.device:
            raise UnsupportedModel(f"tensor {index} is on {tensor.device}, the first on {first.device}")


def _plane(tensor: Tensor, layer: int, column: int) -> Plane:
    """Checks that `[heads, blocks, slots, width]` is a plane; a dimension of one entry has any stride."""
    *outer, (width, step) = zip(tensor.shape, tensor.stride(), strict=True)
    problem = ""
    if width > 1 and step != 1:
        problem = "elements of a head are not contiguous"
    extent = width
    for size, stride in sorted((pair for pair in outer if pair[0] > 1), key=lambda pair: pair[1]):
        if stride < extent:
            problem = problem or "tokens overlap"
        extent = stride * size
    if problem:
        raise UnsupportedModel(
            f"layer {layer}: {problem}: [heads, blocks, slots, width] is {_numbers(tensor)}, "
            f"its strides {tensor.stride()}"
        )
    return Plane(tensor, column)


def _numbers(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
