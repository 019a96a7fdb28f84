"""Whole blocks, by the compiled kernels and without them, against slices of the engine's own tensors."""

from __future__ import annotations

import pytest
import torch

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import OpaqueBlocks, opaque
from lmcache_core.kernels.compiled import native_library

BLOCKS = 6
MOVERS = ["memmove"] if native_library() is None else ["memmove", "compiled"]


@pytest.fixture(params=MOVERS, autouse=True)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "memmove":
        monkeypatch.setattr(opaque, "native_library", lambda: None)
    return request.param


def layers_of(view: str) -> list[torch.Tensor]:
    """Two layers `[blocks, 3, 7] int16`: on their own, or every second block of a larger tensor."""
    whole = torch.randint(-(2**15), 2**15, [2, 2 * BLOCKS, 3, 7], dtype=torch.int16)
    return [layer[::2] if view == "apart" else layer[BLOCKS:] for layer in whole]


def payload_of(layers: list[torch.Tensor], block_ids: list[int]) -> list[bytes]:
    return [b"".join(layer[i].contiguous().numpy().tobytes() for i in block_ids) for layer in layers]


@pytest.mark.parametrize("view", ["together", "apart"])
@pytest.mark.parametrize("block_ids", [[0], [5, 0, 3], [1, 2, 3, 5], [2, 2]], ids=str)
def test_gathered_blocks_lie_in_the_order_of_their_ids(view: str, block_ids: list[int]) -> None:
    layers = layers_of(view)
    blocks = OpaqueBlocks(layers)
    payload = [memoryview(bytearray(len(block_ids) * blocks.block_nbytes)) for _ in layers]
    blocks.gather(block_ids, payload)
    assert [bytes(memory) for memory in payload] == payload_of(layers, block_ids)


@pytest.mark.parametrize("view", ["together", "apart"])
@pytest.mark.parametrize("block_ids", [[0], [5, 0, 3], [1, 2, 3, 5]], ids=str)
def test_scattered_blocks_are_written_and_no_other(view: str, block_ids: list[int]) -> None:
    source, target = layers_of(view), layers_of(view)
    before = [layer.clone() for layer in target]
    payload = [memoryview(memory) for memory in payload_of(source, block_ids)]
    OpaqueBlocks(target).scatter(block_ids, payload)
    for got, new, old in zip(target, source, before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(got[block], (new if block in block_ids else old)[block])


@pytest.mark.parametrize(
    ("block_ids", "message"), [([6], "among 6"), ([-1], "among 6"), ([], "among 6")], ids=str
)
def test_blocks_that_are_not_there_move_nothing(block_ids: list[int], message: str) -> None:
    layers = layers_of("together")
    blocks = OpaqueBlocks(layers)
    payload = [memoryview(bytearray(max(1, len(block_ids)) * blocks.block_nbytes)) for _ in layers]
    for move in (blocks.gather, blocks.scatter):
        with pytest.raises(ValueError, match=message):
            move(block_ids, payload)
    assert not any(any(memory) for memory in payload)


def test_a_scatter_that_names_a_block_twice_and_short_payloads_are_refused() -> None:
    layers = layers_of("together")
    blocks = OpaqueBlocks(layers)
    payload = [memoryview(bytearray(2 * blocks.block_nbytes)) for _ in layers]
    with pytest.raises(ValueError, match="named twice"):
        blocks.scatter([3, 3], payload)
    with pytest.raises(ValueError, match="payload segment 0 must be 126"):
        blocks.gather([1, 2, 3], payload)
    with pytest.raises(ValueError, match="read-only: True"):
        blocks.gather([1, 2], [memory.toreadonly() for memory in payload])


def test_ids_may_be_a_tensor_and_must_be_integers() -> None:
    layers = layers_of("apart")
    blocks = OpaqueBlocks(layers)
    payload = [memoryview(bytearray(2 * blocks.block_nbytes)) for _ in layers]
    blocks.gather(torch.tensor([4, 1], dtype=torch.int32), payload)
    assert [bytes(memory) for memory in payload] == payload_of(layers, [4, 1])
    with pytest.raises(TypeError, match="float"):
        blocks.gather([1.0, 2.0], payload)


def test_payloads_that_overlap_each_other_or_the_engine_are_refused() -> None:
    layers = [torch.zeros(BLOCKS, 42, dtype=torch.uint8) for _ in range(2)]
    blocks, memory = OpaqueBlocks(layers), memoryview(bytearray(2 * 84))
    with pytest.raises(ValueError, match="segment 1 of frame 0 overlaps another one"):
        blocks.gather([0, 1], [memory[:84], memory[83:167]])
    inside = memoryview(layers[0].numpy()).cast("B")[-84:]
    for move in (blocks.gather, blocks.scatter):
        with pytest.raises(ValueError, match="segment 1 of frame 0 overlaps the engine's own memory"):
            move([0, 1], [memory[:84], inside])


def test_tensors_that_are_not_memory_of_the_host_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="tensor 0 is on meta"):
        OpaqueBlocks([torch.empty(4, 3, 8, device="meta")])
    emptied = torch.zeros(4, 3, 8)
    emptied.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedModel, match="a storage of 0"):
        OpaqueBlocks([emptied])
    whole = torch.zeros(7, 3, 8)
    with pytest.raises(UnsupportedModel, match="plane 0 of layer 0 and plane 0 of layer 1 overlap"):
        OpaqueBlocks([whole[:4], whole[3:]])


def test_blocks_with_holes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="holes or overlap"):
        OpaqueBlocks([torch.zeros(4, 3, 8)[..., :6]])
