"""Paged KV of random bits on a device of host memory, staged copies of it, and an oracle of its payloads."""

from __future__ import annotations

import torch
from cache_scenario import CONTENT, HEADS, LAYERS
from lazy_device import LazyDevice

from lmcache_core.kernels.layout import blocks_layout
from lmcache_core.kernels.staging import StagedMover, Staging

BLOCKS, BLOCK_SLOTS = 9, 16
NUM_SLOTS = BLOCKS * BLOCK_SLOTS
ORDERS = {
    "all as late as can be": {"engine_greedy": False, "ours_greedy": False},
    "engine early, copies late": {"engine_greedy": True, "ours_greedy": False},
    "engine late, copies early": {"engine_greedy": False, "ours_greedy": True},
    "all at once": {"engine_greedy": True, "ours_greedy": True},
}
"""In which a `LazyDevice` runs its work."""


def random_layers(seed: int, num_layers: int = LAYERS) -> list[torch.Tensor]:
    """`[blocks, heads, slots, 2 dim]` with CONTENT bytes a token and head."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, BLOCK_SLOTS, CONTENT // 2)
    return [
        torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        for _ in range(num_layers)
    ]


def expected(layers: list[torch.Tensor], slots: list[int], hole: int = 0) -> list[bytes]:
    """The payload, element by element of the declaration."""
    payload = []
    for layer in layers:
        raw = layer.view(torch.uint8)
        rows = [
            raw[slot // BLOCK_SLOTS, head, slot % BLOCK_SLOTS].numpy().tobytes()
            if slot >= 0
            else bytes([hole]) * CONTENT
            for head in range(HEADS)
            for slot in slots
        ]
        payload.append(b"".join(rows))
    return payload


def room_for(num_tokens: int, num_layers: int = LAYERS) -> list[memoryview]:
    return [memoryview(bytearray(HEADS * num_tokens * CONTENT)) for _ in range(num_layers)]


def views(payload: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(segment)) for segment in payload]


def staged(
    device: LazyDevice, layers: list[torch.Tensor], *, staging_tokens: int = 8
) -> tuple[Staging, StagedMover]:
    staging = Staging(device, blocks_layout(layers, "nhse"), staging_tokens=staging_tokens)
    return staging, StagedMover(staging, range(len(layers)))


def overwrite(layers: list[torch.Tensor], value: int) -> None:
    for layer in layers:
        layer.view(torch.uint8).fill_(value)
