"""Paged KV whose every element says its place, and an oracle that indexes by element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from lmcache_core.kernels.compiled import native_library

LAYERS, HEADS, DIM = 3, 2, 4
BLOCKS, BLOCK_SLOTS = 5, 3
SENTINEL = -7.0

MOVERS = ["reference"] if native_library() is None else ["reference", "compiled"]
"""What can move the KV of a `PagedKV` here; the fixture `mover` has each."""
needs_kernels = pytest.mark.parametrize("mover", MOVERS[1:], indirect=True)


def number(layer: int, kv: int, head: int, slot: int, element: int) -> float:
    """The value that the tests put at one place; exact in bfloat16 only where it is below 256."""
    return float((((layer * 2 + kv) * HEADS + head) * 16 + slot) * DIM + element)


def places(num_slots: int) -> Iterator[tuple[int, int, int, int]]:
    return itertools.product(range(2), range(HEADS), range(num_slots), range(DIM))


def block_place(axes: str, kv: int, head: int, slot: int, element: int) -> tuple[int, ...]:
    """Where an engine with these axes keeps one element."""
    values = {
        "c": kv,
        "h": head,
        "n": slot // BLOCK_SLOTS,
        "s": slot % BLOCK_SLOTS,
        "d": element,
        "e": kv * DIM + element,
    }
    return tuple(values[axis] for axis in axes)


def block_shape(axes: str) -> list[int]:
    sizes = {"c": 2, "h": HEADS, "n": BLOCKS, "s": BLOCK_SLOTS, "d": DIM, "e": 2 * DIM}
    return [sizes[axis] for axis in axes]


def numbered_blocks(axes: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    layers = []
    for layer in range(LAYERS):
        tensor = torch.full(block_shape(axes), SENTINEL, dtype=dtype)
        for kv, head, slot, element in places(BLOCKS * BLOCK_SLOTS):
            tensor[block_place(axes, kv, head, slot, element)] = number(layer, kv, head, slot, element)
        layers.append(tensor)
    return layers


def numbered_pairs(
    axes: str, rows: int, row: int, num_slots: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sizes = {"b": rows, "h": HEADS, "t": num_slots, "d": DIM}
    both = []
    for kv in range(2):
        layers = []
        for layer in range(LAYERS):
            tensor = torch.full([sizes[axis] for axis in axes], SENTINEL)
            for head, slot, element in itertools.product(range(HEADS), range(num_slots), range(DIM)):
                place = {"b": row, "h": head, "t": slot, "d": element}
                tensor[tuple(place[axis] for axis in axes)] = number(layer, kv, head, slot, element)
            layers.append(tensor)
        both.append(layers)
    return both[0], both[1]


def new_payload(
    num_tokens: int, itemsize: int = 4, num_heads: int = HEADS, dim: int = DIM
) -> list[memoryview]:
    nbytes = num_heads * num_tokens * 2 * dim * itemsize
    return [memoryview(bytearray(b"\xa5" * nbytes)) for _ in range(LAYERS)]


def payload_numbers(payload: Sequence[memoryview]) -> list[list[float]]:
    return [list(memory.cast("f")) for memory in payload]


def expected_numbers(slots: Sequence[int]) -> list[list[float]]:
    """The canonical order, written out: [layers][heads, tokens, K then V]."""
    return [
        [
            number(layer, kv, head, slot, element)
            for head in range(HEADS)
            for slot in slots
            for kv in range(2)
            for element in range(DIM)
        ]
        for layer in range(LAYERS)
    ]


def padded_latents(seed: int) -> list[torch.Tensor]:
    """vLLM's MLA pages where another group's are larger: 16 latents of 576, then 256 elements of nothing."""
    page = 16 * 576 + 256
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 999, [5 * page], generator=generator, dtype=torch.int16)
        .view(torch.bfloat16)
        .as_strided([5, 16, 576], [page, 576, 1])
        for _ in range(LAYERS)
    ]
