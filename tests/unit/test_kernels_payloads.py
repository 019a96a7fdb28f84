"""What a call is given: frames, their segments and slots, holes, layers one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_kv import (
    BLOCK_SLOTS,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    SENTINEL,
    block_place,
    block_shape,
    expected_numbers,
    new_payload,
    number,
    numbered_blocks,
    payload_numbers,
    places,
)

from lmcache_core.kernels import PagedKV

pytestmark = pytest.mark.usefixtures("mover")

BLOCK_AXES = ["cnshd", "ncshd", "nshe", "nhse", "nchsd"]


@pytest.mark.parametrize("mover", ["reference"], indirect=True)
def test_nothing_larger_than_an_index_is_allocated() -> None:
    """Counted by torch's own profiler, so a fresh tensor anywhere in gather or scatter is seen."""
    keys = [torch.zeros(1, HEADS, 600, 64) for _ in range(LAYERS)]
    blocks = [torch.zeros(2, 40, 16, HEADS, 64) for _ in range(LAYERS)]
    values = [torch.zeros_like(tensor) for tensor in keys]
    pairs, paged = PagedKV.from_pairs(keys, values), PagedKV.from_blocks(blocks, axes="cnshd")
    payload = new_payload(512, dim=64)
    index = torch.randperm(600)[:512]
    with torch.profiler.profile(profile_memory=True) as profiler:
        for kv in (pairs, paged):
            for slots in (range(3, 515), index):
                kv.gather(slots, payload)
                kv.scatter(slots, payload)
    largest = max(event.cpu_memory_usage for event in profiler.events())
    assert largest <= 8 * 512 * HEADS * 2 < payload[0].nbytes // 8


def test_a_read_only_payload_is_scattered_and_not_gathered_into() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    payload = new_payload(2)
    kv.gather(range(2), payload)
    target = PagedKV.from_blocks([torch.zeros_like(t) for t in numbered_blocks("cnshd")], axes="cnshd")
    target.scatter(range(2), [memory.toreadonly() for memory in payload])
    copied = new_payload(2)
    target.gather(range(2), copied)
    assert [bytes(memory) for memory in copied] == [bytes(memory) for memory in payload]
    with pytest.raises(ValueError, match="read-only: True"):
        kv.gather(range(2), [memory.toreadonly() for memory in payload])


@pytest.mark.parametrize("axes", BLOCK_AXES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_hole_is_left_alone_on_both_sides(axes: str, dtype: torch.dtype) -> None:
    slots = [-1, 14, -1, 0, 1, -1]
    index = torch.tensor(slots, dtype=dtype)
    payload = new_payload(len(slots))
    PagedKV.from_blocks(numbered_blocks(axes), axes=axes).gather(index, payload)
    untouched = memoryview(b"\xa5" * 4).cast("f")[0]
    for layer, numbers in enumerate(payload_numbers(payload)):
        want = [
            untouched if slot < 0 else number(layer, kv, head, slot, element)
            for head in range(HEADS)
            for slot in slots
            for kv in range(2)
            for element in range(DIM)
        ]
        assert numbers == want
    layers = [torch.full(block_shape(axes), SENTINEL) for _ in range(LAYERS)]
    PagedKV.from_blocks(layers, axes=axes).scatter(index, payload)
    for layer, tensor in enumerate(layers):
        for kv, head, slot, element in places(BLOCKS * BLOCK_SLOTS):
            want_one = number(layer, kv, head, slot, element) if slot in slots else SENTINEL
            assert tensor[block_place(axes, kv, head, slot, element)].item() == want_one


def test_nothing_but_holes_moves_nothing() -> None:
    layers = numbered_blocks("nhse")
    before = [tensor.clone() for tensor in layers]
    kv = PagedKV.from_blocks(layers, axes="nhse")
    payload = new_payload(2)
    for move in (kv.gather, kv.scatter):
        move(torch.tensor([-1, -1]), payload)
    assert all(torch.equal(tensor, old) for tensor, old in zip(layers, before, strict=True))
    assert {byte for memory in payload for byte in memory} == {0xA5}


def test_several_frames_are_moved_by_one_call() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("nshe"), axes="nshe")
    frames: list[tuple[range | torch.Tensor, list[memoryview]]] = [
        (range(2, 9), new_payload(7)),
        (torch.tensor([14, 0], dtype=torch.int32), new_payload(2)),
        (torch.tensor([5, 4, 5]), new_payload(3)),
    ]
    kv.gather_many(frames)
    assert [payload_numbers(payload) for _, payload in frames] == [
        expected_numbers(slots) for slots in (range(2, 9), [14, 0], [5, 4, 5])
    ]
    layers = [torch.full(block_shape("nshe"), SENTINEL) for _ in range(LAYERS)]
    PagedKV.from_blocks(layers, axes="nshe").scatter_many([*frames[:1], (range(10, 12), frames[1][1])])
    for layer, tensor in enumerate(layers):
        for kv_, head, slot, element in places(BLOCKS * BLOCK_SLOTS):
            source = {10: 14, 11: 0}.get(slot, slot)
            written = slot in range(2, 9) or slot in (10, 11)
            want = number(layer, kv_, head, source, element) if written else SENTINEL
            assert tensor[block_place("nshe", kv_, head, slot, element)].item() == want
    kv.gather_many([])


def test_one_layer_is_moved_alone() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("nshe"), axes="nshe")
    payload = new_payload(3)
    kv.layer(1).gather(torch.tensor([8, 2, 3]), payload[1:2])
    assert payload_numbers(payload)[1] == expected_numbers([8, 2, 3])[1]
    assert {byte for memory in (payload[0], payload[2]) for byte in memory} == {0xA5}
    layers = [torch.full(block_shape("nshe"), SENTINEL) for _ in range(LAYERS)]
    PagedKV.from_blocks(layers, axes="nshe").layer(2).scatter(range(3), payload[1:2])
    assert [bool((tensor != SENTINEL).any()) for tensor in layers] == [False, False, True]


def test_a_bytearray_is_a_payload_too() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    want, got = new_payload(2), [bytearray(128) for _ in range(LAYERS)]
    for slots in (range(2), torch.arange(2)):
        kv.gather(slots, want)
        kv.gather(slots, got)  # type: ignore[arg-type]
        assert got == [bytes(segment) for segment in want]
        kv.scatter(slots, got)  # type: ignore[arg-type]


def test_a_list_of_segments_may_change_once_the_call_has_begun() -> None:
    """Another thread may take them out of it: what was given is used, and kept for as long."""
    segments = new_payload(2)

    class Emptied(list[memoryview]):
        def __iter__(self) -> Iterator[memoryview]:
            yield from segments
            self.clear()

    given = Emptied(segments)
    PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd").gather(range(2), given)
    assert not given
    assert payload_numbers(segments) == expected_numbers(range(2))


def test_slots_need_not_be_contiguous() -> None:
    payload = new_payload(4)
    slots = torch.arange(15)[1:13:3]
    PagedKV.from_blocks(numbered_blocks("nhse"), axes="nhse").gather(slots, payload)
    assert payload_numbers(payload) == expected_numbers([1, 4, 7, 10])


def test_slots_that_are_copied_are_there_until_the_call_has_ended() -> None:
    """So many of them that their memory is the system's again, and reading it a crash, once it is freed."""
    num_tokens = 5 << 20  # 40 MiB of slots
    apart = torch.stack([torch.arange(num_tokens)] * 2, dim=1)[:, 0]
    layer = torch.arange(num_tokens, dtype=torch.int32).to(torch.int8).view(1, num_tokens, 1)
    payload = bytearray(num_tokens)
    kv = PagedKV.from_blocks([layer.view(torch.float8_e4m3fn)], axes="nsd")
    kv.gather(apart, [memoryview(payload)])
    assert payload == layer.numpy().tobytes()


@pytest.mark.parametrize("slots", [range(15), torch.randperm(15)], ids=["range", "index"])
def test_layers_on_the_host_are_moved_one_by_one(slots: range | torch.Tensor) -> None:
    kv, payload = PagedKV.from_blocks(numbered_blocks("nshe"), axes="nshe"), new_payload(5)
    order = [int(slot) for slot in slots]
    layers = kv.by_layer(slots := slots if isinstance(slots, range) else slots.clone())
    if not isinstance(slots, range):
        slots.zero_()  # they were copied
    for layer in range(LAYERS):
        layers.gather_layer(layer, 4, 5, payload[layer])
    layers.wait_gathered()
    assert payload_numbers(payload) == expected_numbers(order[4:9])
    target = [torch.full(block_shape("nshe"), SENTINEL) for _ in range(LAYERS)]
    loads = PagedKV.from_blocks(target, axes="nshe").by_layer(range(15))
    for layer in (1, 0, 2):
        loads.scatter_layer(layer, 0, 5, payload[layer].toreadonly())
    got = new_payload(5)
    PagedKV.from_blocks(target, axes="nshe").gather(range(5), got)
    assert payload_numbers(got) == expected_numbers(order[4:9])
    assert sum(int((tensor != SENTINEL).sum()) for tensor in target) == LAYERS * HEADS * 5 * 2 * DIM
    with pytest.raises(ValueError, match="layer 3 of 3"):
        layers.gather_layer(3, 0, 5, payload[0])
    with pytest.raises(ValueError, match="must be 320 "):
        layers.gather_layer(0, 0, 5, payload[0][1:])
