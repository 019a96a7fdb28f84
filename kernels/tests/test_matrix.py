"""Gather and scatter of the installed library against the oracle: all layouts, and as properties."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core_kernels import abi

_spec = importlib.util.spec_from_file_location("kernel_matrix", Path(__file__).parent / "matrix.py")
assert _spec is not None
assert _spec.loader is not None
matrix = sys.modules["kernel_matrix"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix)

LIBRARY = abi.host_library()
BEST = LIBRARY.lmck_instructions()


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether this processor has the set; the library uses it for the test."""
    yield bool(LIBRARY.lmck_use_instructions(request.param.encode()))
    LIBRARY.lmck_use_instructions(BEST)


@pytest.mark.parametrize("axes", matrix.LAYOUTS.values(), ids=matrix.LAYOUTS.keys())
def test_every_layout_is_moved_as_its_declaration_says(axes: str, instructions: bool) -> None:
    if instructions:
        rng = random.Random(axes)
        for seed in range(15):
            matrix.check(LIBRARY, matrix.random_case(rng, axes), seed, twin=False)


@pytest.mark.parametrize("axes", matrix.LAYOUTS.values(), ids=matrix.LAYOUTS.keys())
def test_the_device_body_moves_every_layout_too(axes: str) -> None:
    rng = random.Random(axes)
    for seed in range(15):
        matrix.check(LIBRARY, matrix.random_case(rng, axes), seed, twin=True)


@pytest.mark.parametrize("axes", matrix.LAYOUTS.values(), ids=matrix.LAYOUTS.keys())
def test_streaming_stores_and_threads_move_the_same_bytes(axes: str, instructions: bool) -> None:
    if instructions:
        case = matrix.random_case(random.Random(axes), axes, large=True)
        matrix.check(LIBRARY, case, 1, twin=False)


@pytest.mark.parametrize(("axes", "padded"), [("hnsd", "n"), ("nshd", "s"), ("nshd", "h")])
def test_k_and_v_may_have_strides_of_their_own(axes: str, padded: str) -> None:
    """Of heads alone, of blocks alone, of slots and blocks."""
    slots = [0, 1, 5, 6, 11, 3]
    keys = matrix.Case(axes, 1, 2, 3, 4, 8, slots=slots)
    values = matrix.Case(axes, 1, 2, 3, 4, 8, paddings={padded: 1}, slots=slots)
    rng = random.Random(1)
    rows = {(0, *place): rng.randbytes(8) for place in keys.places()}

    def move(name: str, tensors: list[list[list[bytearray]]], segments: list[bytearray]) -> list[bytearray]:
        pair = [tensors[0][0][0], tensors[1][0][1]]
        call = matrix.Call(keys, [pair], segments)
        call.planes[1] = matrix.Call(values, [pair], segments).planes[1]
        assert call.run(LIBRARY, name) == abi.OK
        return pair

    segments = [bytearray(2 * len(slots) * 16)]
    move("lmck_gather", [matrix.written(case, rows, set(range(12))) for case in (keys, values)], segments)
    assert segments == matrix.packed(keys, rows)
    pair = move("lmck_scatter", [matrix.new_tensors(case) for case in (keys, values)], segments)
    assert pair[0] == matrix.written(keys, rows, set(slots))[0][0]
    assert pair[1] == matrix.written(values, rows, set(slots))[0][1]


def test_rows_shorter_than_a_vector_may_lie_anywhere_in_large_calls(instructions: bool) -> None:
    if instructions:
        row_nbytes = {b"baseline": 12, b"avx2": 24, b"avx512": 48}[LIBRARY.lmck_instructions()]
        slots = random.Random(1).sample(range(1600), 1600)
        case = matrix.Case("cnshd", 1, 2, 100, 16, row_nbytes, {"h": 1, "d": 1}, 5, 7, slots)
        case.layers = (1 << 20) // (4 * case.num_slots * row_nbytes) + 1  # from 1 MiB on, stores stream
        matrix.check(LIBRARY, case, 1, twin=False)


@st.composite
def cases(draw: st.DrawFn) -> matrix.Case:
    axes = draw(st.sampled_from(list(matrix.LAYOUTS.values())))
    case = matrix.Case(
        axes=axes,
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 4)),
        block_slots=draw(st.integers(1, 5)),
        row_nbytes=draw(st.integers(1, 40) | st.sampled_from([64, 128, 192])),
        paddings={axis: draw(st.integers(0, 2)) for axis in axes},
        offset=draw(st.integers(0, 17)),
        segment_offset=draw(st.integers(0, 17)),
        slot_type=draw(st.sampled_from("qi")),
    )
    every = list(range(case.num_slots))
    slots = draw(st.lists(st.sampled_from(every), min_size=1, max_size=12, unique=True))
    holes = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    case.slots = [matrix.HOLE if hole else slot for slot, hole in zip(slots, holes, strict=True)]
    return case


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000), twin=st.booleans())
def test_any_shape_strides_alignment_and_slots_are_moved_as_declared(
    case: matrix.Case, seed: int, twin: bool
) -> None:
    matrix.check(LIBRARY, case, seed, twin=twin)


def test_every_instruction_set_narrows_to_the_same_bytes() -> None:
    for seed in range(6):
        results = set()
        for name in (b"baseline", b"avx2", b"avx512"):
            if LIBRARY.lmck_use_instructions(name):
                results.add(matrix.narrowed(LIBRARY, seed))
        LIBRARY.lmck_use_instructions(BEST)
        assert len(results) == 1


def test_narrowing_of_rows_that_do_not_fit_is_refused() -> None:
    call, _, _ = call_of([1, 2])
    call.layout.narrow = 5
    assert call.run(LIBRARY, "lmck_gather") == abi.BAD_SHAPE
    call.layout.narrow = 4
    assert call.run(LIBRARY, "lmck_gather_twin") == abi.BAD_SHAPE


def call_of(
    slots: list[int], slot_type: str = "q"
) -> tuple[matrix.Call, list[bytearray], list[list[bytearray]]]:
    case = matrix.Case("cnshd", 2, 2, 3, 4, 8, slots=slots, slot_type=slot_type)
    tensors = matrix.new_tensors(case)
    segments = [bytearray(case.heads * len(slots) * 16) for _ in range(2)]
    return matrix.Call(case, tensors, segments), segments, tensors


@pytest.mark.parametrize(
    ("slots", "slot_type", "status", "place", "value"),
    [
        ([0, 12], "q", abi.BAD_SLOT, 1, 12),
        ([0, -2], "i", abi.BAD_SLOT, 1, -2),
        ([2**40], "q", abi.BAD_SLOT, 0, 2**40),
        ([-(2**62), 3], "q", abi.BAD_SLOT, 0, -(2**62)),
        ([11, 12], "", abi.BAD_SLOT, 1, 12),
        ([-1, 0], "", abi.BAD_SLOT, 0, -1),
    ],
)
def test_a_slot_out_of_bounds_is_named_and_nothing_is_written(
    slots: list[int], slot_type: str, status: int, place: int, value: int
) -> None:
    for name in ("lmck_gather", "lmck_scatter"):
        call, segments, tensors = call_of(slots, slot_type)
        assert call.run(LIBRARY, name) == status
        assert (call.fault.frame, call.fault.place, call.fault.value) == (0, place, value)
        assert not any(any(segment) for segment in segments)
        assert all(set(tensor) == {matrix.SENTINEL} for layer in tensors for tensor in layer)


def test_the_device_body_skips_a_slot_out_of_bounds_and_counts_it() -> None:
    call, segments, _ = call_of([3, 12, -1, -7, 2**40])
    bad_slots = ctypes.c_int64()
    assert LIBRARY.lmck_gather_twin(call.layout, call.frame, bad_slots) == abi.OK
    assert bad_slots.value == 3
    assert segments[0][:16] == bytes([matrix.SENTINEL]) * 16
    assert not any(segments[0][16:80])


def test_a_scatter_that_names_a_slot_twice_is_refused() -> None:
    call, _, tensors = call_of([5, 4, 5])
    assert call.run(LIBRARY, "lmck_scatter") == abi.SLOT_TWICE
    assert (call.fault.place, call.fault.value) == (2, 5)
    assert all(set(tensor) == {matrix.SENTINEL} for layer in tensors for tensor in layer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_planes", 3),
        ("num_heads", 0),
        ("num_slots", -1),
        ("block_slots", 0),
        ("row_nbytes", 0),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(field: str, value: int) -> None:
    call, _, _ = call_of([1, 2])
    setattr(call.layout, field, value)
    for name in ("lmck_gather", "lmck_scatter", "lmck_gather_twin", "lmck_scatter_twin"):
        bad_slots = ctypes.c_int64()
        function = getattr(LIBRARY, name)
        arguments = (bad_slots,) if name.endswith("twin") else (1, 1, call.fault)
        assert function(call.layout, call.frame, *arguments) == abi.BAD_SHAPE
