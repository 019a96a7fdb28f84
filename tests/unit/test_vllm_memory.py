"""Blocks on a device, moved by whichever kernels are there, against plain indexing."""

from __future__ import annotations

import itertools

import pytest
import torch

from lmcache_core.connectors.vllm.memory import DeviceBlocks, in_memory_order
from lmcache_core.errors import UnsupportedModel

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 7, 2, 16, 64, 3


def tensors(order: str) -> list[torch.Tensor]:
    """Each layer's `[B, H, N, C]`, lying in one buffer in `order`."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    whole = torch.randn([sizes[axis] for axis in order]).to(torch.float16)
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_whole_blocks_move_in_the_order_of_their_bytes(order: str) -> None:
    layers, ids = tensors(order), [5, 0, 6]
    ordered = [in_memory_order(layer, BLOCKS) for layer in layers]
    assert {name for _, name in ordered} == {order[2:]}
    blocks = DeviceBlocks([layer for layer, _ in ordered], TOKENS)
    payload = [memoryview(bytearray(3 * blocks.block_nbytes)) for _ in layers]
    blocks.gather(ids, payload)
    for segment, (layer, _) in zip(payload, ordered, strict=True):
        assert bytes(segment) == layer[ids].contiguous().view(torch.uint8).numpy().tobytes()

    before = [layer.clone() for layer in layers]
    blocks.scatter([1, 2, 3], payload)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 2, 3]], old[ids])
        assert torch.equal(layer[[0, 4, 5, 6]], old[[0, 4, 5, 6]])


def test_a_block_that_attention_keeps_in_pieces_moves_whole() -> None:
    pieces = torch.randn(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)
    whole, name = in_memory_order(pieces, BLOCKS)
    assert name == "2 x HNC"
    blocks = DeviceBlocks([whole], TOKENS)
    payload = [memoryview(bytearray(2 * blocks.block_nbytes))]
    blocks.gather([4, 1], payload)
    assert bytes(payload[0]) == pieces[[8, 9, 2, 3]].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_blocks_with_holes_are_refused(order: str) -> None:
    ordered = [in_memory_order(layer, BLOCKS)[0] for layer in tensors(order)]
    with pytest.raises(UnsupportedModel, match=r"have holes.*VLLM_KV_CACHE_LAYOUT"):
        DeviceBlocks(ordered, TOKENS)


def test_a_null_or_unknown_block_is_refused_before_anything_moves() -> None:
    blocks = DeviceBlocks([in_memory_order(layer, BLOCKS)[0] for layer in tensors("LBNHC")], TOKENS)
    for bad, gathering in itertools.product((-1, BLOCKS), (True, False)):
        payload = [memoryview(bytearray(2 * blocks.block_nbytes)) for _ in range(LAYERS)]
        with pytest.raises(ValueError, match=r"block ids|slot"):
            (blocks.gather if gathering else blocks.scatter)([0, bad], payload)
        assert not any(map(any, payload))
