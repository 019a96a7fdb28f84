"""vLLM's KV tensors of one attention group, as blocks of bytes: in place, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import OpaqueBlocks, PagedKV

if TYPE_CHECKING:
    from torch import Tensor

AXES = "HNC"
"""What is inside a block: KV heads, tokens, the K and V of a token and head."""


class Blocks(Protocol):
    """Copies whole blocks. A payload is one flat memoryview a layer, `[blocks, block bytes]`."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_nbytes(self) -> int: ...

    def gather(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None: ...

    def scatter(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None: ...


class DeviceBlocks:
    """Blocks that the kernels move between a GPU and frames, each cut into one row a token.

    Where the cuts are means nothing: a row is a `block_tokens`-th of a block's bytes, so that the staging
    memory on the device is that of as many tokens. The kernels run on the engine's current stream: a gather
    takes what was queued before it and returns when the payload is whole; what is queued behind a scatter
    sees it.

    Raises:
        UnsupportedModel: the device can't be reached, or `layers` `[num blocks, …]` aren't alike or aren't
            dense inside a block.
    """

    def __init__(self, layers: Sequence[Tensor], block_tokens: int) -> None:
        first = layers[0]
        for number, tensor in enumerate(layers):
            if not tensor[0].is_contiguous():
                raise UnsupportedModel(
                    f"the blocks of tensor {number} have holes: shape {list(tensor.shape)}, strides "
                    f"{list(tensor.stride())}; a VLLM_KV_CACHE_LAYOUT such as LBNHC has none"
                )
        self.num_blocks = first.shape[0]
        self.block_nbytes = first[0].numel() * first.element_size()
        self._block_tokens = block_tokens
        self._rows = PagedKV.from_blocks(
            [tensor.view(self.num_blocks, block_tokens, -1) for tensor in layers], axes="nsd"
        )

    def gather(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None:
        """Copies these blocks into `payload`, for all layers. Raises ValueError as `PagedKV.gather`."""
        self._rows.gather(self._slots(block_ids), payload)

    def scatter(self, block_ids: Sequence[int], payload: Sequence[memoryview]) -> None:
        """Copies `payload` into these blocks, for all layers. Raises ValueError as `PagedKV.scatter`."""
        self._rows.scatter(self._slots(block_ids), payload)

    def _slots(self, block_ids: Sequence[int]) -> Tensor:
        import torch

        ids = torch.tensor(block_ids, dtype=torch.int64)
        if ids.numel() and int(ids.min()) < 0:
            raise ValueError(f"block ids {list(block_ids)} are not all among {self.num_blocks}")
        return (ids[:, None] * self._block_tokens + torch.arange(self._block_tokens)).flatten()


def in_memory_order(tensor: Tensor, num_blocks: int) -> tuple[Tensor, str]:
    """A layer's `[B, H, N, C]` as `[num blocks, …]` in the order of its bytes, and the order's name.

    Attention kernels may use smaller blocks than the scheduler: then B is a multiple of `num_blocks`, and the
    name says how many make one. An axis with one entry has no place of its own: it is named last but C.
    """
    if tensor.dim() != 1 + len(AXES) or tensor.shape[0] % num_blocks:
        raise UnsupportedModel(
            f"vLLM keeps {num_blocks} blocks, and its tensors of shape {list(tensor.shape)} can't be divided "
            "into as many"
        )
    strides = tensor.stride()
    inner = sorted((1, 2), key=lambda axis: (tensor.shape[axis] == 1, -strides[axis]))
    order = "".join(AXES[axis - 1] for axis in inner) + AXES[-1]
    tensor = tensor.permute(0, *inner, 3)
    ratio = tensor.shape[0] // num_blocks
    if ratio == 1:
        return tensor, order
    shape, stride = tensor.shape[1:], tensor.stride()
    return (
        tensor.as_strided((num_blocks, ratio, *shape), (ratio * stride[0], *stride)),
        f"{ratio} x {order}",
    )


def blocks_of(
    tensors: Sequence[Tensor], num_blocks: int, block_tokens: int, nbytes: int
) -> tuple[Blocks, str]:
    """One group's blocks, a tensor a layer, and how the axes lie inside them.

    Raises:
        UnsupportedModel: they aren't `num_blocks` dense blocks of `nbytes`, alike in all layers.
    """
    ordered = [in_memory_order(tensor, num_blocks) for tensor in tensors]
    orders = sorted({order for _, order in ordered})
    if len(orders) > 1:
        raise UnsupportedModel(f"layers of one group differ in the order of their axes: {', '.join(orders)}")
    layers = [tensor for tensor, _ in ordered]
    on_host = layers[0].device.type == "cpu"
    blocks: Blocks = OpaqueBlocks(layers) if on_host else DeviceBlocks(layers, block_tokens)
    if (blocks.num_blocks, blocks.block_nbytes) != (num_blocks, nbytes):
        raise UnsupportedModel(
            f"vLLM keeps {num_blocks} blocks of {nbytes} bytes, its tensors hold {blocks.num_blocks} of "
            f"{blocks.block_nbytes}"
        )
    return blocks, orders[0]
