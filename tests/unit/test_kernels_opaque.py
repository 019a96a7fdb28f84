"""Whole blocks are copied byte for byte, and no others are touched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import OpaqueBlocks

NUM_BLOCKS, SHAPE = 7, (2, 4, 6)
NBYTES = 2 * 4 * 6 * 4


def numbered(layer: int) -> Tensor:
    return torch.arange(NUM_BLOCKS * 48, dtype=torch.float32).reshape(NUM_BLOCKS, *SHAPE) + 1000 * layer


def interleaved() -> list[Tensor]:
    """Layers that share one storage, block by block: a block's stride is that of all layers."""
    storage = torch.empty(NUM_BLOCKS, 3, *SHAPE)
    for layer in range(3):
        storage[:, layer] = numbered(layer)
    return [storage[:, layer] for layer in range(3)]


LAYOUTS = {"separate": lambda: [numbered(layer) for layer in range(3)], "interleaved": interleaved}


@pytest.fixture(params=LAYOUTS)
def layers(request: pytest.FixtureRequest) -> list[Tensor]:
    return LAYOUTS[request.param]()


def payload(num_blocks: int, fill: int = 0xAB) -> list[memoryview]:
    return [memoryview(bytearray([fill]) * (num_blocks * NBYTES)) for _ in range(3)]


@pytest.mark.parametrize("ids", [[0], [6], [2, 3, 4], [5, 1, 2, 6], [4, 3, 2], list(range(NUM_BLOCKS))])
def test_a_payload_holds_the_blocks_in_the_order_of_their_ids(layers: list[Tensor], ids: list[int]) -> None:
    segments = payload(len(ids))
    OpaqueBlocks(layers).gather(ids, segments)
    for layer, segment in enumerate(segments):
        assert bytes(segment) == numbered(layer)[ids].numpy().tobytes()


@pytest.mark.parametrize("ids", [[0], [6], [2, 3, 4], [5, 1, 2, 6]])
def test_blocks_take_the_payload_and_the_others_stay(layers: list[Tensor], ids: list[int]) -> None:
    segments = [segment.toreadonly() for segment in payload(len(ids), fill=0)]
    OpaqueBlocks(layers).scatter(ids, segments)
    for layer, tensor in enumerate(layers):
        expected = numbered(layer)
        expected[ids] = 0
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("ids", [[], [-1], [NUM_BLOCKS], [1, 1]])
def test_ids_that_make_no_sense_are_refused_before_anything_is_written(
    layers: list[Tensor], ids: Sequence[int]
) -> None:
    before = [tensor.clone() for tensor in layers]
    with pytest.raises(ValueError, match="block"):
        OpaqueBlocks(layers).scatter(ids, payload(len(ids)))
    assert all(torch.equal(tensor, was) for tensor, was in zip(layers, before, strict=True))


def test_a_payload_of_another_size_or_that_may_not_be_written_is_refused(layers: list[Tensor]) -> None:
    blocks = OpaqueBlocks(layers)
    with pytest.raises(ValueError, match="segment 0 must be 192"):
        blocks.gather([1], payload(2))
    with pytest.raises(ValueError, match="2 payload segments for 3 layers"):
        blocks.gather([1], payload(1)[:2])
    with pytest.raises(ValueError, match="read-only: True"):
        blocks.gather([1], [segment.toreadonly() for segment in payload(1)])


def test_tensors_whose_blocks_are_not_whole_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="holes or overlap"):
        OpaqueBlocks([numbered(0).transpose(1, 2)])
    with pytest.raises(UnsupportedModel, match="holes or overlap"):
        OpaqueBlocks([numbered(0)[:1].expand(NUM_BLOCKS, *SHAPE)])
    with pytest.raises(UnsupportedModel, match=r"tensor 1 is torch.float16"):
        OpaqueBlocks([numbered(0), numbered(0).half()])
    with pytest.raises(UnsupportedModel, match="only cpu"):
        OpaqueBlocks([torch.empty(2, 2, device="meta")])
