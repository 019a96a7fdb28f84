"""Gather and scatter, by torch and by the compiled kernels, against an oracle that indexes by element."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from paged_kv import (
    BLOCK_SLOTS,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    MOVERS,
    SENTINEL,
    block_place,
    block_shape,
    expected_numbers,
    needs_kernels,
    new_payload,
    number,
    numbered_blocks,
    numbered_pairs,
    padded_latents,
    payload_numbers,
    places,
)

from lmcache_core.kernels import PagedKV

pytestmark = pytest.mark.usefixtures("mover")

BLOCK_AXES = ["cnshd", "ncshd", "nshe", "nhse", "nchsd"]
RANGES = [range(15), range(3), range(1, 2), range(4, 6), range(2, 14), range(3, 9), range(8, 10)]
INDEXES = [[0], [14, 0, 7], [5, 4, 3, 2], list(range(15))]


@pytest.mark.parametrize("axes", BLOCK_AXES)
@pytest.mark.parametrize("slots", RANGES, ids=str)
def test_gather_of_a_range_of_block_slots_yields_each_tokens_own_values(axes: str, slots: range) -> None:
    payload = new_payload(len(slots))
    PagedKV.from_blocks(numbered_blocks(axes), axes=axes).gather(slots, payload)
    assert payload_numbers(payload) == expected_numbers(slots)


@pytest.mark.parametrize("axes", BLOCK_AXES)
@pytest.mark.parametrize("slots", INDEXES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_of_any_block_slots_yields_each_tokens_own_values(
    axes: str, slots: list[int], dtype: torch.dtype
) -> None:
    payload = new_payload(len(slots))
    PagedKV.from_blocks(numbered_blocks(axes), axes=axes).gather(torch.tensor(slots, dtype=dtype), payload)
    assert payload_numbers(payload) == expected_numbers(slots)


@pytest.mark.parametrize("axes", BLOCK_AXES)
@pytest.mark.parametrize("slots", [*RANGES, *INDEXES], ids=str)
def test_scatter_writes_the_named_block_slots_and_no_other(axes: str, slots: range | list[int]) -> None:
    layers = [torch.full(block_shape(axes), SENTINEL) for _ in range(LAYERS)]
    payload = new_payload(len(slots))
    for memory, numbers in zip(payload, expected_numbers(slots), strict=True):
        memory.cast("f")[:] = memoryview(torch.tensor(numbers).numpy())
    PagedKV.from_blocks(layers, axes=axes).scatter(
        slots if isinstance(slots, range) else torch.tensor(slots), payload
    )
    for layer, tensor in enumerate(layers):
        for kv, head, slot, element in places(BLOCKS * BLOCK_SLOTS):
            want = number(layer, kv, head, slot, element) if slot in slots else SENTINEL
            assert tensor[block_place(axes, kv, head, slot, element)].item() == want


@pytest.mark.parametrize("axes", ["bhtd", "bthd", "htbd"])
@pytest.mark.parametrize("slots", [range(11), range(3, 7), [9, 0, 4]], ids=str)
def test_gather_reads_one_row_of_key_and_value_pairs(axes: str, slots: range | list[int]) -> None:
    keys, values = numbered_pairs(axes, rows=3, row=1, num_slots=11)
    payload = new_payload(len(slots))
    kv = PagedKV.from_pairs(keys, values, axes=axes, row=1)
    kv.gather(slots if isinstance(slots, range) else torch.tensor(slots), payload)
    assert payload_numbers(payload) == expected_numbers(slots)


@pytest.mark.parametrize("axes", ["bhtd", "bthd", "htbd"])
@pytest.mark.parametrize("slots", [range(11), range(3, 7), [9, 0, 4]], ids=str)
def test_scatter_writes_one_row_of_key_and_value_pairs_and_no_other(
    axes: str, slots: range | list[int]
) -> None:
    want_keys, want_values = numbered_pairs(axes, rows=3, row=2, num_slots=11)
    keys = [torch.full_like(tensor, SENTINEL) for tensor in want_keys]
    values = [torch.full_like(tensor, SENTINEL) for tensor in want_values]
    payload = new_payload(len(slots))
    for memory, numbers in zip(payload, expected_numbers(slots), strict=True):
        memory.cast("f")[:] = memoryview(torch.tensor(numbers).numpy())
    kv = PagedKV.from_pairs(keys, values, axes=axes, row=2)
    kv.scatter(slots if isinstance(slots, range) else torch.tensor(slots), payload)
    others = [slot for slot in range(11) if slot not in slots]
    for tensor in (*want_keys, *want_values):
        tensor.index_fill_(axes.index("t"), torch.tensor(others, dtype=torch.int64), SENTINEL)
    for got, want in zip([*keys, *values], [*want_keys, *want_values], strict=True):
        assert torch.equal(got, want)


def test_strided_views_into_larger_storage_are_read_and_written_in_place() -> None:
    storage = torch.full([LAYERS, BLOCKS + 2, 2, HEADS, BLOCK_SLOTS, DIM], SENTINEL)
    layers = [storage[layer, 1:-1].transpose(2, 3) for layer in range(LAYERS)]
    for tensor, numbered in zip(layers, numbered_blocks("ncshd"), strict=True):
        tensor.copy_(numbered)
    kv = PagedKV.from_blocks(layers, axes="ncshd")
    by_range, by_index = new_payload(7), new_payload(7)
    kv.gather(range(4, 11), by_range)
    kv.gather(torch.arange(4, 11), by_index)
    assert payload_numbers(by_range) == payload_numbers(by_index) == expected_numbers(range(4, 11))
    storage.fill_(SENTINEL)
    kv.scatter(torch.arange(4, 11), by_index)
    assert (storage != SENTINEL).sum().item() == LAYERS * 2 * HEADS * 7 * DIM
    assert torch.all(storage[:, 0] == SENTINEL)
    assert torch.all(storage[:, -1] == SENTINEL)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_bits_survive_unchanged_in_every_dtype(dtype: torch.dtype) -> None:
    """Not-a-number patterns, infinities and subnormals are bytes like any other."""
    itemsize = dtype.itemsize
    bits = torch.randint(0, 256, [2, LAYERS, 1, HEADS, 9, DIM * itemsize], dtype=torch.uint8)
    keys, values = ([layer.view(dtype) for layer in half] for half in bits)
    kv = PagedKV.from_pairs(keys, values)
    assert kv.content_format == f"kv {str(dtype).removeprefix('torch.')} {DIM}"
    assert kv.content_nbytes == 2 * DIM * itemsize
    for slots in (range(2, 8), torch.arange(2, 8)):
        payload = new_payload(6, itemsize)
        kv.gather(slots, payload)
        for layer, memory in enumerate(payload):
            want = b"".join(
                bytes(bits[half, layer, 0, head, slot].tolist())
                for head in range(HEADS)
                for slot in range(2, 8)
                for half in range(2)
            )
            assert bytes(memory) == want


@pytest.mark.parametrize("slots", [range(4), torch.arange(4)], ids=["range", "index"])
def test_tensors_of_inference_mode_and_of_training_are_both_moved(slots: range | torch.Tensor) -> None:
    with torch.inference_mode():
        inference = [torch.ones(1, HEADS, 4, DIM) for _ in range(LAYERS)]
        inference_values = [torch.ones_like(keys) for keys in inference]
    training, training_values = (
        [torch.ones(1, HEADS, 4, DIM, requires_grad=True) * 1 for _ in range(LAYERS)] for _ in range(2)
    )
    payload = new_payload(4)
    both = ((inference, inference_values), (training, training_values))
    for keys, values in both:
        PagedKV.from_pairs(keys, values).gather(slots, payload)
        assert set(payload[0].cast("f")) == {1.0}
    for memory in payload:
        memory[:] = bytes(memory.nbytes)
    for keys, values in both:
        PagedKV.from_pairs(keys, values).scatter(slots, payload)
        assert keys[0].abs().sum().item() == 0


@pytest.mark.parametrize("mover", ["reference"], indirect=True)
def test_whole_blocks_in_a_row_are_copied_at_once() -> None:
    kv = PagedKV.from_blocks([torch.zeros(2, 40, 16, HEADS, 64) for _ in range(LAYERS)], axes="cnshd")
    payload = new_payload(512, dim=64)
    with torch.profiler.profile() as profiler:
        kv.gather(range(3, 515), payload)
    copies = [event for event in profiler.events() if event.name == "aten::copy_"]
    assert len(copies) == LAYERS * 2 * 3  # of K and of V: the rest of a block, whole blocks, the start of one


def test_the_stride_of_a_dimension_of_one_entry_means_nothing() -> None:
    odd = torch.arange(5.0 * DIM).as_strided([1, 1, 5, DIM], [3, 7, DIM, 1])
    kv = PagedKV.from_pairs([odd] * LAYERS, [odd + 100] * LAYERS)
    for slots in (range(1, 4), torch.arange(1, 4)):
        payload = new_payload(3, num_heads=1)
        kv.gather(slots, payload)
        want = [
            float(slot * DIM + e + 100 * half) for slot in (1, 2, 3) for half in range(2) for e in range(DIM)
        ]
        assert payload_numbers(payload) == [want] * LAYERS


def test_token_pools_without_a_batch_are_read_by_slot() -> None:
    """SGLang: `k_buffer[layer]` and `v_buffer[layer]` are `[slots, heads, dim]`."""
    keys, values = numbered_pairs("bthd", rows=1, row=0, num_slots=11)
    kv = PagedKV.from_pairs([k[0] for k in keys], [v[0] for v in values], axes="thd")
    payload = new_payload(4)
    kv.gather(torch.tensor([7, 1, 10, 2]), payload)
    assert payload_numbers(payload) == expected_numbers([7, 1, 10, 2])


@pytest.mark.parametrize("axes", ["nsd", "snd"])
def test_a_latent_has_one_plane_and_no_v(axes: str) -> None:
    sizes = {"n": 4, "s": 3, "d": 5}
    layers = []
    for layer in range(LAYERS):
        tensor = torch.full([sizes[axis] for axis in axes], SENTINEL)
        for slot, element in itertools.product(range(12), range(5)):
            place = {"n": slot // 3, "s": slot % 3, "d": element}
            tensor[tuple(place[axis] for axis in axes)] = layer * 100 + slot * 5 + element
        layers.append(tensor)
    kv = PagedKV.from_blocks(layers, axes=axes)
    assert (kv.content_format, kv.content_nbytes, kv.num_heads) == ("mla float32 5", 20, 1)
    payload = [memoryview(bytearray(3 * 20)) for _ in range(LAYERS)]
    kv.gather(torch.tensor([11, 0, 4]), payload)
    want = [
        [float(layer * 100 + slot * 5 + e) for slot in (11, 0, 4) for e in range(5)]
        for layer in range(LAYERS)
    ]
    assert payload_numbers(payload) == want
    target = [torch.full_like(tensor, SENTINEL) for tensor in layers]
    PagedKV.from_blocks(target, axes=axes).scatter(torch.tensor([11, 0, 4]), payload)
    for got, tensor in zip(target, layers, strict=True):
        assert (got != SENTINEL).sum() == 15
        assert torch.all((got == SENTINEL) | (got == tensor))


@pytest.mark.parametrize("differing", ["heads", "blocks"])
@pytest.mark.parametrize("slots", [range(3, 13), torch.tensor([14, 0, 7, 8])], ids=["range", "index"])
def test_k_and_v_may_have_strides_of_their_own(differing: str, slots: range | torch.Tensor) -> None:
    if differing == "heads":
        axes = ("bhtd", "bthd")
        halves = [numbered_pairs(a, rows=1, row=0, num_slots=15)[i] for i, a in enumerate(axes)]
        layers = [halves[0], [tensor.transpose(1, 2) for tensor in halves[1]]]
    else:
        layers = list(numbered_pairs("bhtd", rows=1, row=0, num_slots=15))
        layers[1] = [torch.zeros(1, HEADS, 15, 3 * DIM)[..., :DIM].copy_(tensor) for tensor in layers[1]]
        if len(MOVERS) == 1:
            pytest.skip("needs lmcache-core-kernels")
    payload = new_payload(len(slots))
    PagedKV.from_pairs(*layers).gather(slots, payload)
    assert payload_numbers(payload) == expected_numbers(list(slots))
    into = [[torch.empty_like(t).copy_(t * 0 - 1) for t in half] for half in layers]
    PagedKV.from_pairs(*into).scatter(slots, payload)
    rest = [slot for slot in range(15) if slot not in list(slots)]
    for got, want in zip(itertools.chain(*into), itertools.chain(*layers), strict=True):
        assert torch.equal(got[:, :, list(slots)], want[:, :, list(slots)])
        assert torch.all(got[:, :, rest] == -1)


@needs_kernels
@pytest.mark.parametrize("slots", [range(7, 70), torch.randperm(80)[:33]], ids=["range", "index"])
def test_pages_with_room_behind_the_last_slot_are_moved(slots: range | torch.Tensor) -> None:
    source, target = padded_latents(1), padded_latents(2)
    kv = PagedKV.from_blocks(source, axes="nsd")
    payload = [memoryview(bytearray(len(slots) * kv.content_nbytes)) for _ in source]
    kv.gather(slots, payload)
    index = torch.tensor(list(slots))
    for layer, memory in zip(source, payload, strict=True):
        assert memory.tobytes() == layer.view(torch.int16).reshape(80, 576)[index].numpy().tobytes()
    want = [layer.clone().view(torch.int16).reshape(80, 576) for layer in target]
    for layer, other in zip(want, source, strict=True):
        layer[index] = other.view(torch.int16).reshape(80, 576)[index]
    PagedKV.from_blocks(target, axes="nsd").scatter(slots, payload)
    assert all(
        torch.equal(t.view(torch.int16).reshape(80, 576), w) for t, w in zip(target, want, strict=True)
    )


def test_layers_may_lie_among_each_other_and_be_the_same() -> None:
    """Pages that hold all layers, `[blocks, layers, 2, …]`, and layers that use another one's KV."""
    whole = torch.zeros(BLOCKS, 2, 2, BLOCK_SLOTS, HEADS, DIM)
    layers = [whole[:, 0], whole[:, 1], whole[:, 0]]
    for layer, numbered in zip(layers[:2], numbered_blocks("ncshd"), strict=False):
        layer.copy_(numbered)
    payload = new_payload(4)
    PagedKV.from_blocks(layers, axes="ncshd").gather(range(4), payload)
    want = expected_numbers(range(4))
    assert payload_numbers(payload) == [want[0], want[1], want[0]]


def test_the_how_to_page_runs_as_it_stands() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "move-kv.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(page), "exec"), {})
