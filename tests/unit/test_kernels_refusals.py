"""What is no KV, no slots or no payload, whoever moves it: refused with the numbers; nothing is moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from paged_kv import (
    BLOCK_SLOTS,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    SENTINEL,
    block_shape,
    needs_kernels,
    new_payload,
    numbered_blocks,
    padded_latents,
)

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import PagedKV

pytestmark = pytest.mark.usefixtures("mover")


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
        r"\[1, 2, 5, 6\], the first \[1, 2, 5, 4\]; K and V must be alike, in head size too",
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
        (range(2), [*new_payload(2), *new_payload(2)], "6 payload segments for 3 layers"),
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


@pytest.mark.parametrize("nbytes", [0, 8])
def test_slots_whose_memory_was_taken_away_are_refused(nbytes: int) -> None:
    """Memory that isn't there would be read, or, having no address, be taken for a range of slots."""
    layers = [torch.full(block_shape("cnshd"), SENTINEL) for _ in range(LAYERS)]
    kv = PagedKV.from_blocks(layers, axes="cnshd")
    slots = torch.tensor([9, 8])
    slots.untyped_storage().resize_(nbytes)
    for take in (
        kv.by_layer,
        lambda slots: kv.gather(slots, new_payload(2)),
        lambda slots: kv.scatter(slots, new_payload(2)),
    ):
        with pytest.raises(
            ValueError, match=rf"slots of shape \[2\] reaches to byte 16 of a storage of {nbytes}"
        ):
            take(slots)
    assert all(torch.all(tensor == SENTINEL) for tensor in layers)


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


def test_one_frame_that_does_not_fit_keeps_every_frame_from_being_written() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("nshe"), axes="nshe")
    first = new_payload(2)
    with pytest.raises(ValueError, match="token 0 of frame 1: slot 15"):
        kv.gather_many([(range(2), first), (torch.tensor([15]), new_payload(1))])
    with pytest.raises(ValueError, match="segment 2 of frame 1 must be 64"):
        kv.gather_many([(range(2), first), (range(1), new_payload(1)[:2] + new_payload(2)[:1])])
    assert {byte for memory in first for byte in memory} == {0xA5}


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


@pytest.mark.parametrize("mover", ["reference"], indirect=True)
def test_without_the_kernels_rows_at_odd_distances_are_refused() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"stride 9472 is not a multiple of a row of 576 .*needs lmcache"
    ):
        PagedKV.from_blocks(padded_latents(1), axes="nsd")


def of_three(*nbytes: int) -> list[bytearray]:
    return [bytearray(each) for each in nbytes]


def released() -> memoryview:
    view = memoryview(bytearray(128))
    view.release()
    return view


@needs_kernels
@pytest.mark.parametrize(
    ("second", "error"),
    [
        ((range(2, 4), of_three(128, 128, 128)), None),
        ((range(2, 4), [*of_three(128, 128), bytes(128)]), "segment 2 of frame 1 must be .*read-only: True"),
        ((range(2, 4), [*of_three(128, 128), memoryview(bytearray(256))[::2]]), "must be 128 contiguous"),
        ((range(2, 4), of_three(128, 128, 64)), "segment 2 of frame 1 must be 128 .* not 64"),
        ((range(2, 4), of_three(128, 128)), "2 payload segments for 3 layers in frame 1"),
        ((torch.tensor([2, 15]), of_three(128, 128, 128)), "slot 15 is not among 15"),
        ((range(2, 4), [*of_three(128, 128), object()]), "bytes-like object is required"),
        ((range(2, 4), [*of_three(128, 128), released()]), "released memoryview"),
    ],
    ids=["none", "read-only", "holes", "short", "missing", "slot", "no buffer", "released"],
)
def test_a_payload_is_free_again_after_each_call_and_each_refusal(
    second: tuple[range | torch.Tensor, list[bytearray]], error: str | None
) -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    first = of_three(128, 128, 128)
    frames = [(range(2), first), second]
    with pytest.raises((ValueError, TypeError), match=error) if error else nullcontext():
        kv.gather_many(frames)  # type: ignore[arg-type]
    assert any(any(segment) for segment in first) == (error is None)
    for segment in (*first, *second[1]):
        if isinstance(segment, bytearray):
            segment.append(0)  # BufferError while anything still holds it


def test_segments_that_are_no_buffers_are_type_errors() -> None:
    kv = PagedKV.from_blocks(numbered_blocks("cnshd"), axes="cnshd")
    for move in (kv.gather, kv.scatter):
        with pytest.raises(TypeError, match="bytes-like object"):
            move(range(2), [bytearray(128), bytearray(128), 5])
