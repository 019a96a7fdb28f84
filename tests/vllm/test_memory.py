"""Blocks over KV tensors as vLLM itself lays them out for GPUs: every layout, on the host's memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_session import Engine, Request, tokens

from lmcache_core.connectors.vllm.memory import DeviceBlocks, blocks_of, in_memory_order
from lmcache_core.errors import UnsupportedModel

NUM_BLOCKS, BLOCK_TOKENS, NUM_LAYERS = 6, 16, 4
ATTENTION = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=3, head_size=32, dtype=torch.bfloat16)
LATENTS = MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=96, dtype=torch.bfloat16)
DENSE = [layout for layout in KVCacheLayout if layout.is_block_compact]
IDS = [4, 1, 5]


def views(
    spec: FullAttentionSpec | MLAAttentionSpec, layout: KVCacheLayout, kernel_tokens: int | None = None
) -> list[torch.Tensor]:
    """vLLM's views `[B, H, N, C]` of all layers, full of random bytes."""
    strides = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout, kernel_tokens)
    size = NUM_BLOCKS * NUM_LAYERS * spec.page_size_bytes
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    ratio = 1 if kernel_tokens is None else spec.block_size // kernel_tokens
    placed = KVCacheTensor(size, [f"layer {i}" for i in range(NUM_LAYERS)], strides[0], ratio * strides[1])
    return create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel_tokens)


def stored(layer: torch.Tensor, ids: Sequence[int], order: str) -> bytes:
    """The blocks' elements in the order that its name says, by plain indexing."""
    ratio = layer.shape[0] // NUM_BLOCKS
    axes = [1 + "HNC".index(axis) for axis in order[-3:]]
    parts = [
        layer[block * ratio + i].permute(*(axis - 1 for axis in axes)) for block in ids for i in range(ratio)
    ]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def as_device(layers: Sequence[torch.Tensor]) -> DeviceBlocks:
    return DeviceBlocks([in_memory_order(layer, NUM_BLOCKS)[0] for layer in layers], BLOCK_TOKENS)


CASES = [
    *(pytest.param(ATTENTION, layout, None, id=layout.name) for layout in DENSE),
    *(pytest.param(LATENTS, layout, None, id=f"latents-{layout.name}") for layout in KVCacheLayout),
    pytest.param(ATTENTION, KVCacheLayout.LBHNC, 8, id="smaller-kernel-blocks"),
]


@pytest.mark.parametrize(("spec", "layout", "kernel_tokens"), CASES)
def test_blocks_are_read_and_written_in_place_in_every_dense_layout(
    spec: FullAttentionSpec | MLAAttentionSpec, layout: KVCacheLayout, kernel_tokens: int | None
) -> None:
    layers = views(spec, layout, kernel_tokens)
    on_host, order = blocks_of(layers, NUM_BLOCKS, BLOCK_TOKENS, spec.page_size_bytes)
    for blocks in (on_host, as_device(layers)):
        payload = [memoryview(bytearray(len(IDS) * blocks.block_nbytes)) for _ in layers]
        blocks.gather(IDS, payload)
        assert [bytes(segment) for segment in payload] == [stored(layer, IDS, order) for layer in layers]

        others = [block for block in range(NUM_BLOCKS) if block not in IDS]
        untouched = [stored(layer, others, order) for layer in layers]
        fresh = [random.Random(i).randbytes(segment.nbytes) for i, segment in enumerate(payload)]
        blocks.scatter(IDS, [memoryview(segment) for segment in fresh])
        assert [stored(layer, IDS, order) for layer in layers] == fresh
        assert [stored(layer, others, order) for layer in layers] == untouched


def test_the_order_of_heads_and_tokens_is_part_of_the_name() -> None:
    names = {
        layout.name: blocks_of(views(ATTENTION, layout), NUM_BLOCKS, BLOCK_TOKENS, ATTENTION.page_size_bytes)[
            1
        ]
        for layout in DENSE
    }
    assert names == {"LBHNC": "HNC", "LBNHC": "NHC", "BLHNC": "HNC", "BLNHC": "NHC"}
    halves = views(ATTENTION, KVCacheLayout.LBHNC, 8)
    assert in_memory_order(halves[0], NUM_BLOCKS)[1] == "2 x HNC"


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC], ids=lambda layout: layout.name)
def test_blocks_with_holes_are_refused_with_a_layout_that_has_none(layout: KVCacheLayout) -> None:
    with pytest.raises(UnsupportedModel, match="have holes"):
        blocks_of(views(ATTENTION, layout), NUM_BLOCKS, BLOCK_TOKENS, ATTENTION.page_size_bytes)
    with pytest.raises(UnsupportedModel, match="VLLM_KV_CACHE_LAYOUT"):
        as_device(views(ATTENTION, layout))


def test_blocks_that_do_not_exist_are_refused_before_anything_is_read() -> None:
    blocks = as_device(views(ATTENTION, KVCacheLayout.LBNHC))
    for ids in ([-1], [NUM_BLOCKS], [0, NUM_BLOCKS]):
        payload = [memoryview(bytearray(len(ids) * blocks.block_nbytes)) for _ in range(NUM_LAYERS)]
        with pytest.raises(ValueError, match=r"block|slot"):
            blocks.gather(ids, payload)
        assert not any(any(segment) for segment in payload)


def test_sizes_that_do_not_agree_with_the_spec_are_refused_with_the_numbers() -> None:
    layers = views(ATTENTION, KVCacheLayout.LBNHC)
    with pytest.raises(UnsupportedModel, match="6 blocks of 1 bytes, its tensors hold 6 of 6144"):
        blocks_of(layers, NUM_BLOCKS, BLOCK_TOKENS, 1)
    with pytest.raises(UnsupportedModel, match="keeps 4 blocks"):
        blocks_of(layers, 4, BLOCK_TOKENS, ATTENTION.page_size_bytes)
    with pytest.raises(UnsupportedModel, match="differ in the order"):
        blocks_of(
            [layers[0], views(ATTENTION, KVCacheLayout.LBHNC)[0]],
            NUM_BLOCKS,
            BLOCK_TOKENS,
            ATTENTION.page_size_bytes,
        )


def test_tokens_are_the_same_where_blocks_move_as_on_a_gpu(model: Path, log: Path, plain: Engine) -> None:
    requests = [Request(tokens(300 + 260 * i, seed=700 + i)) for i in range(3)]
    cache = {"chunk_tokens": 256, "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "64MiB"}]}
    expected = [answer.tokens for answer in plain.generate(*requests)]
    with Engine(model, log, cache, environment={"BLOCKS_AS_ON_A_GPU": "1"}) as engine:
        cold, warm = engine.generate(*requests), engine.generate(*requests)
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in warm] == expected
    assert [answer.cached for answer in cold] == [0, 0, 0]
    assert [answer.cached for answer in warm] == [256, 512, 768]
