"""Gather and scatter, by torch and by the compiled kernels, against an oracle that indexes by element."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import PagedKV, paged
from lmcache_core.kernels.compiled import native_library

LAYERS, HEADS, DIM = 3, 2, 4
BLOCKS, BLOCK_SLOTS = 5, 3
SENTINEL = -7.0


MOVERS = ["reference"] if native_library() is None else ["reference", "compiled"]


needs_kernels = pytest.mark.parametrize("mover", MOVERS[1:], indirect=True)


@pytest.fixture(params=MOVERS, autouse=True)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test holds for both ways to move KV."""
    if request.param == "reference":
        monkeypatch.setattr(paged, "native_library", lambda: None)
    return request.param


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
    assert (storage != SENTINEL).sum().item() == LAYERS * 2 * HEADS * 7 * DIM - (
        storage == 0
    ).sum().item() * 0
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


@pytest.fixture(scope="module")
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=8,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_gather_reads_what_a_dynamic_cache_was_updated_with() -> None:
    """The engine's own cache write, for numbered tokens, in two steps as in prefill and decode."""
    cache = DynamicCache()
    for tokens in (range(6), range(6, 11)):
        for layer in range(LAYERS):
            keys, values = (
                torch.tensor(
                    [
                        [[number(layer, kv, head, t, e) for e in range(DIM)] for head in range(HEADS)]
                        for t in tokens
                    ]
                ).transpose(0, 1)[None]
                for kv in range(2)
            )
            cache.update(keys, values, layer)
    kv = PagedKV.from_pairs([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers])
    payload = new_payload(8)
    kv.gather(range(2, 10), payload)
    assert payload_numbers(payload) == expected_numbers(range(2, 10))


def test_a_cache_filled_by_scatter_continues_a_real_model_as_its_own_cache_does(
    tiny_llama: LlamaForCausalLM,
) -> None:
    tokens = torch.randint(0, 50, [1, 20])
    with torch.inference_mode():
        own = tiny_llama(tokens[:, :16], use_cache=True).past_key_values
        payload = new_payload(16, dim=8)
        PagedKV.from_pairs([x.keys for x in own.layers], [x.values for x in own.layers]).gather(
            range(16), payload
        )
    for layer, memory in enumerate(payload):  # an element at a time, from the model's cache to the payload
        numbers = memory.cast("f")
        for head, token, element in itertools.product(range(HEADS), range(16), range(8)):
            start = (head * 16 + token) * 16 + element
            assert numbers[start] == own.layers[layer].keys[0, head, token, element].item()
            assert numbers[start + 8] == own.layers[layer].values[0, head, token, element].item()
    loaded = DynamicCache()
    for layer in range(LAYERS):
        loaded.update(torch.zeros(1, HEADS, 16, 8), torch.zeros(1, HEADS, 16, 8), layer)
    PagedKV.from_pairs([x.keys for x in loaded.layers], [x.values for x in loaded.layers]).scatter(
        range(16), payload
    )
    with torch.inference_mode():
        want = tiny_llama(tokens[:, 16:], cache=own).logits
        got = tiny_llama(tokens[:, 16:], cache=loaded).logits
    assert torch.equal(got, want)


def test_left_padded_rows_are_read_from_their_own_first_slot(tiny_llama: LlamaForCausalLM) -> None:
    """Position p of a row padded by n tokens lies in slot n + p, and equals the row run alone."""
    long, short = torch.randint(1, 50, [12]), torch.randint(1, 50, [7])
    batch = torch.stack([long, torch.cat([torch.zeros(5, dtype=torch.int64), short])])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    with torch.inference_mode():
        both = tiny_llama(batch, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        alone = tiny_llama(short[None])
    payload = new_payload(7, dim=8)
    layers = both.past_key_values.layers
    PagedKV.from_pairs([x.keys for x in layers], [x.values for x in layers], row=1).gather(
        range(5, 12), payload
    )
    for memory, layer in zip(payload, alone.past_key_values.layers, strict=True):
        got = torch.frombuffer(memory, dtype=torch.float32).view(HEADS, 7, 2, 8)
        torch.testing.assert_close(got[:, :, 0], layer.keys[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[:, :, 1], layer.values[0], rtol=1e-5, atol=1e-5)


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


def overlapping_halves(whole: torch.Tensor, first: int, second: int) -> PagedKV:
    return PagedKV.from_pairs([whole[..., first : first + 4]], [whole[..., second : second + 4]])


def windows(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return whole[:4], whole[3:]


def among_each_other(room: torch.Tensor) -> PagedKV:
    keys = room.as_strided([1, 1, 3, 4], [160, 160, 16, 1])
    return PagedKV.from_pairs([keys], [room.as_strided([1, 1, 3, 4], [160, 160, 24, 1], 4)])


def emptied() -> torch.Tensor:
    tensor = torch.zeros(4, 2, 8)
    tensor.untyped_storage().resize_(0)
    return tensor


UNFIT: list[tuple[str, Callable[[], object], str]] = [
    (
        "shapes that differ between layers",
        lambda: PagedKV.from_pairs(
            [torch.zeros(1, 2, 5, 4), torch.zeros(1, 3, 5, 4)], [torch.zeros(1, 2, 5, 4)] * 2
        ),
        r"tensor 1 has shape \[1, 3, 5, 4\], the first \[1, 2, 5, 4\]",
    ),
    (
        "K and V of different width",
        lambda: PagedKV.from_pairs([torch.zeros(1, 2, 5, 4)], [torch.zeros(1, 2, 5, 6)]),
        r"\[1, 2, 5, 6\]",
    ),
    (
        "more layers of K than of V",
        lambda: PagedKV.from_pairs([torch.zeros(1, 2, 5, 4)] * 2, [torch.zeros(1, 2, 5, 4)]),
        "2 layers of K, 1 of V",
    ),
    (
        "a mix of dtypes",
        lambda: PagedKV.from_pairs([torch.zeros(1, 2, 5, 4)], [torch.zeros(1, 2, 5, 4).bfloat16()]),
        r"torch\.bfloat16, the first torch\.float32",
    ),
    (
        "a dtype without a content format",
        lambda: PagedKV.from_pairs([torch.zeros(1, 2, 5, 4).double()], [torch.zeros(1, 2, 5, 4).double()]),
        "float64; supported are float32",
    ),
    (
        "too few dimensions",
        lambda: PagedKV.from_blocks([torch.zeros(2, 5, 3, 4)], axes="cnshd"),
        r"\[2, 5, 3, 4\] has 4 dimensions, axes 'cnshd' name 5",
    ),
    (
        "a K/V axis that is not two",
        lambda: PagedKV.from_blocks([torch.zeros(5, 2, 3, 2, 4)], axes="cnshd"),
        "5 entries, not 2",
    ),
    (
        "an odd shared width",
        lambda: PagedKV.from_blocks([torch.zeros(5, 2, 3, 7)], axes="nhse"),
        "7 elements",
    ),
    (
        "elements of a head apart",
        lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 4, 5).transpose(2, 3)]] * 2),
        "not contiguous",
    ),
    (
        "tokens that overlap",
        lambda: PagedKV.from_pairs(*[[torch.zeros(1, 1, 5, 4).expand(1, 2, 5, 4)]] * 2),
        "overlap",
    ),
    (
        "K that is V",
        lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 5, 4)]] * 2),
        "plane 0 of layer 0 and plane 1 of layer 0 overlap: .* rows of 160 and 160 bytes",
    ),
    (
        "K and V that share elements",
        lambda: overlapping_halves(torch.zeros(1, 1, 4, 8), 0, 2),
        r"plane 0 of layer 0 and plane 1 of layer 0 overlap.*rows of 16 and 16 bytes.*\(\(4, 32\),\)",
    ),
    (
        "layers that share a block",
        lambda: PagedKV.from_blocks(list(windows(torch.zeros(7, 3, 2, 8))), axes="nshe"),
        "plane 0 of layer 0 and plane 0 of layer 1 overlap",
    ),
    (
        "K among V, with other strides",
        lambda: among_each_other(torch.zeros(160)),
        "lie among each other, with different strides",
    ),
    (
        "KV that is no tensor",
        lambda: PagedKV.from_blocks([[1.0]], axes="nsd"),
        "tensor 0 is no tensor but list",
    ),
    (
        "KV that is not dense",
        lambda: PagedKV.from_blocks([torch.zeros(4, 2, 8).to_sparse()], axes="nsd"),
        "tensor 0 is torch.sparse_coo, not dense",
    ),
    ("KV whose memory was given up", lambda: PagedKV.from_blocks([emptied()], axes="nsd"), "a storage of 0"),
    (
        "bytes that don't say what they hold",
        lambda: PagedKV.from_blocks([torch.zeros(4, 2, 8, dtype=torch.uint8)], axes="nsd"),
        r"dtype uint8.*tensor.view\(torch.float8_e4m3fn\)",
    ),
    (
        "another device",
        lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 5, 4, device="meta")]] * 2),
        "on meta: that needs CUDA",
    ),
    (
        "tensors that hold nothing",
        lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 0, 4)]] * 2),
        "holds nothing",
    ),
]


@pytest.mark.parametrize(("build", "message"), [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
def test_tensors_that_strides_cannot_say_are_refused_with_the_numbers(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PagedKV.from_pairs([], []), "no layer"),
        (lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 5, 4)]] * 2, axes="bhtt"), "bhtt"),
        (lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 5, 4)]] * 2, axes="cnshd"), "cnshd"),
        (lambda: PagedKV.from_pairs(*[[torch.zeros(1, 2, 5, 4)]] * 2, row=1), "row 1 of a batch of 1"),
        (lambda: PagedKV.from_blocks([torch.zeros(2, 5, 3, 2, 4)], axes="nshd"), "nshd"),
        (
            lambda: PagedKV.from_blocks([torch.zeros(4, 2, 8)], axes="nsd", threads=0),
            "threads must be at least 1, not 0",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_value_errors(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


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


@pytest.mark.parametrize(
    ("slots", "payload", "message"),
    [
        (range(0), new_payload(1), "range"),
        (range(0, 8, 2), new_payload(4), "range"),
        (range(14, 16), new_payload(2), "among 15"),
        (range(-1, 1), new_payload(2), "among 15"),
        (torch.tensor([0, 15]), new_payload(2), "token 1 of frame 0: slot 15 is not among 15"),
        (torch.tensor([3, -2]), new_payload(2), "token 1 of frame 0: slot -2 is not among 15"),
        (torch.tensor([0.0]), new_payload(1), "float32"),
        (torch.tensor([[0]]), new_payload(1), r"\[1, 1\]"),
        (torch.tensor([], dtype=torch.int64), new_payload(1), r"\[0\]"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), new_payload(1), "meta"),
        (torch.zeros(1, dtype=torch.int64).to_sparse(), new_payload(1), "not torch.sparse_coo"),
        ([0], new_payload(1), "a range or a dense tensor, not list"),
        (np.array([0]), new_payload(1), "a range or a dense tensor, not ndarray"),
        (range(2), [bytearray(b"\xa5" * 129)] * 3, "segment 0 of frame 0 must be 128 .* not 129"),
        (range(2), new_payload(3), "segment 0 of frame 0 must be 128"),
        (range(2), new_payload(2)[:2], "2 payload segments for 3 layers"),
        (range(2), [memory[::2] for memory in new_payload(4)], "contiguous"),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),  # a payload's text is an address
)
def test_slots_and_payloads_that_do_not_fit_move_nothing(
    slots: range | torch.Tensor, payload: list[memoryview], message: str
) -> None:
    layers = numbered_blocks("cnshd")
    before = [tensor.clone() for tensor in layers]
    kv = PagedKV.from_blocks(layers, axes="cnshd")
    for move in (kv.gather, kv.scatter):
        with pytest.raises(ValueError, match=message):
            move(slots, payload)
    assert all(torch.equal(tensor, old) for tensor, old in zip(layers, before, strict=True))
    assert {byte for memory in payload for byte in bytes(memory)} == {0xA5}


def test_scatter_refuses_a_slot_named_twice() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    with pytest.raises(ValueError, match="named twice"):
        kv.scatter(torch.tensor([3, 4, 3]), new_payload(3))


def test_scatter_refuses_a_slot_that_two_frames_name_and_writes_neither() -> None:
    layers = [torch.full(block_shape("cnshd"), SENTINEL) for _ in range(LAYERS)]
    kv = PagedKV.from_blocks(layers, axes="cnshd")
    with pytest.raises(ValueError, match="token 2 of frame 1: slot 3 is named twice"):
        kv.scatter_many([(range(4), new_payload(4)), (torch.tensor([9, 8, 3]), new_payload(3))])
    assert all(torch.all(tensor == SENTINEL) for tensor in layers)


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


def test_one_frame_that_does_not_fit_keeps_every_frame_from_being_written() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("nshe"), axes="nshe")
    first = new_payload(2)
    with pytest.raises(ValueError, match="token 0 of frame 1: slot 15"):
        kv.gather_many([(range(2), first), (torch.tensor([15]), new_payload(1))])
    with pytest.raises(ValueError, match="segment 2 of frame 1 must be 64"):
        kv.gather_many([(range(2), first), (range(1), new_payload(1)[:2] + new_payload(2)[:1])])
    assert {byte for memory in first for byte in memory} == {0xA5}


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


def test_payloads_that_overlap_each_other_or_the_engine_are_refused() -> None:
    storage = torch.zeros(2 * BLOCKS * BLOCK_SLOTS * HEADS * DIM * LAYERS)
    layers = list(storage.view(LAYERS, 2, BLOCKS, BLOCK_SLOTS, HEADS, DIM))
    kv = PagedKV.from_blocks(layers, axes="cnshd")
    memory = memoryview(bytearray(4 * 128))
    shared = [memory[:128], memory[256:384], memory[320:448]]
    with pytest.raises(ValueError, match="segment 2 of frame 0 overlaps another one"):
        kv.gather(range(2), shared)
    kv.scatter(range(2), shared)  # reading the same bytes twice harms nobody
    inside = memoryview(storage.numpy()).cast("B")[64:192]
    for move in (kv.gather, kv.scatter):
        with pytest.raises(ValueError, match="segment 1 of frame 0 overlaps the engine's own memory"):
            move(range(2), [memory[:128], inside, memory[128:256]])


@pytest.mark.parametrize("shared", [1, 16])
def test_payloads_that_share_a_byte_are_refused(shared: int) -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    memory = memoryview(bytearray(4 * 128))
    segments = [memory[256:384], memory[:128], memory[128 - shared : 256 - shared]]
    with pytest.raises(ValueError, match="segment 2 of frame 0 overlaps another one"):
        kv.gather(range(2), segments)
    assert not any(memory)


@pytest.mark.parametrize("axes", ["cnshd", "hnse"])
def test_the_first_and_last_byte_of_every_plane_are_the_engines(axes: str) -> None:
    """Also those of the last head, block and slot."""
    memory = bytearray(1 << 16)
    room, shape, layers = torch.frombuffer(memory, dtype=torch.float32), block_shape(axes), []
    numel = torch.Size(shape).numel()
    starts = [1024 + layer * (numel + 512) for layer in range(LAYERS)]
    layers = [room[start : start + numel].view(shape) for start in starts]
    kv = PagedKV.from_blocks(layers, axes=axes)
    away = memoryview(bytearray(2 * 128))
    planes = [(4 * (start + i * numel // 2), 2 * numel) for start in starts for i in range(2)]
    for first, nbytes in planes:
        for at in (first - 127, first + nbytes - 1):
            inside = memoryview(memory)[at : at + 128]
            for move in (kv.gather, kv.scatter):
                with pytest.raises(ValueError, match="segment 1 of frame 0 overlaps the engine's own memory"):
                    move(range(2), [away[:128], inside, away[128:]])
    first, nbytes = planes[0][0], planes[-1][0] + planes[-1][1]
    kv.gather(range(2), [away[:128], memoryview(memory)[first - 128 : first], away[128:]])
    kv.gather(range(2), [away[:128], memoryview(memory)[nbytes : nbytes + 128], away[128:]])


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


@pytest.mark.parametrize("mover", ["reference"], indirect=True)
def test_without_the_kernels_rows_at_odd_distances_are_refused() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"stride 9472 is not a multiple of a row of 576 .*needs lmcache"
    ):
        PagedKV.from_blocks(padded_latents(1), axes="nsd")


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


@needs_kernels
def test_a_payload_is_free_again_after_each_call_and_each_refusal() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    memory = [bytearray(128) for _ in range(LAYERS)]
    kv.gather(range(2), [memoryview(segment) for segment in memory])
    kv.scatter(range(2), [memoryview(segment).toreadonly() for segment in memory])
    with pytest.raises(ValueError, match="read-only"):
        kv.gather(
            range(2), [memoryview(memory[0]), memoryview(memory[1]).toreadonly(), memoryview(memory[2])]
        )
    with pytest.raises(ValueError, match="segment 2"):
        kv.gather(range(2), [memoryview(memory[0]), memoryview(memory[1]), memoryview(memory[2])[:64]])
    for segment in memory:
        segment.append(0)  # BufferError while anything still holds it


@needs_kernels
def test_more_threads_move_the_same_bytes() -> None:
    keys = [
        torch.randint(0, 100, [1, 8, 900, 64], dtype=torch.int32).view(torch.float32) for _ in range(LAYERS)
    ]
    values = [tensor + 1 for tensor in keys]
    slots = torch.randperm(900)[:700]
    payloads = []
    for threads in (1, 3):
        payload = new_payload(700, num_heads=8, dim=64)
        PagedKV.from_pairs(keys, values, threads=threads).gather(slots, payload)
        payloads.append([bytes(memory) for memory in payload])
    assert payloads[0] == payloads[1]


@needs_kernels
def test_a_library_that_does_not_load_is_told_once_and_torch_moves_the_kv(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmcache_core_kernels import abi

    def broken() -> None:
        raise OSError("wrong ELF class")

    monkeypatch.setattr(abi, "host_library", broken)
    native_library.cache_clear()
    try:
        assert native_library() is None
        assert native_library() is None
    finally:
        native_library.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "lmcache-core-kernels can't be used, KV is moved by torch instead: wrong ELF class"
    ]


def test_the_how_to_page_runs_as_it_stands() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "move-kv.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(page), "exec"), {})
