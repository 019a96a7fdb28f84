"""Every layout, word size and alignment against an oracle that follows the engine's declaration, row by row.

Standard library only, so that it also runs under sanitizers: `python matrix.py LIBRARY SEED CASES`.
Each buffer is an allocation of its own and exactly as long as it must be.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_core_kernels import abi

SENTINEL = 0xA5
HOLE = -1

# An engine's declaration: axes outermost first. c: K, then V; n: block; s: slot in a block; h: head; d, e:
# the bytes of a row of K or V, or of both; l: of what has no V. Two tensors a layer where `pair` is set.
LAYOUTS: dict[str, str] = {
    "[2, blocks, slots, heads, dim]": "cnshd",
    "[blocks, 2, slots, heads, dim]": "ncshd",
    "[2, blocks, heads, slots, dim]": "cnhsd",
    "[blocks, 2, heads, slots, dim]": "nchsd",
    "packed [blocks, heads, slots, 2 dim]": "nhse",
    "packed [blocks, slots, heads, 2 dim]": "nshe",
    "token pools [slots, heads, dim], K and V apart": "nshd",
    "pairs [heads, tokens, dim], K and V apart": "hnsd",
    "latents [blocks, slots, dim]": "nsl",
    "opaque blocks [blocks, bytes]": "nl",
}


@dataclass
class Case:
    """One call: the shape, where its memory begins, and which slots its tokens have."""

    axes: str
    layers: int
    heads: int
    blocks: int
    block_slots: int
    row_nbytes: int
    """Of K or V of one token and head; of both together it is twice that."""
    paddings: dict[str, int] = field(default_factory=dict)
    """Entries of an axis that are never used: strides grow."""
    offset: int = 0
    segment_offset: int = 0
    slots: list[int] = field(default_factory=list)
    slot_type: str = "q"
    """`q` int64, `i` int32, or empty: consecutive, from the first one."""
    threads: int = 1

    def __post_init__(self) -> None:
        if "h" not in self.axes:
            self.heads = 1
        if "s" not in self.axes:
            self.block_slots = 1

    @property
    def pair(self) -> bool:
        return self.axes in ("nshd", "hnsd")

    @property
    def num_slots(self) -> int:
        return self.blocks * self.block_slots

    @property
    def kinds(self) -> int:
        return 1 if "l" in self.axes else 2

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "c": 2,
            "n": self.blocks,
            "s": self.block_slots,
            "h": self.heads,
            "d": self.row_nbytes,
            "e": 2 * self.row_nbytes,
            "l": self.row_nbytes,
        }

    @property
    def strides(self) -> dict[str, int]:
        """Bytes from one entry of an axis to the next: row-major over sizes and paddings."""
        strides, step = {}, 1
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= self.sizes[axis] + self.paddings.get(axis, 0)
        return strides

    @property
    def tensor_nbytes(self) -> int:
        strides = self.strides
        return 1 + sum((self.sizes[axis] - 1) * strides[axis] for axis in self.axes)

    def place(self, kind: int, head: int, slot: int) -> tuple[int, int]:
        """(tensor of the layer, first byte) of K or V of one token and head, by the declaration."""
        at = {"c": kind, "n": slot // self.block_slots, "s": slot % self.block_slots, "h": head}
        at |= {"d": 0, "e": kind * self.row_nbytes, "l": 0}
        strides = self.strides
        tensor = kind if self.pair else 0
        return tensor, self.offset + sum(at[axis] * strides[axis] for axis in self.axes)

    def places(self) -> itertools.product[tuple[int, int, int]]:
        return itertools.product(range(self.kinds), range(self.heads), range(self.num_slots))


def new_tensors(case: Case) -> list[list[bytearray]]:
    nbytes = case.offset + case.tensor_nbytes
    return [
        [bytearray([SENTINEL]) * nbytes for _ in range(2 if case.pair else 1)] for _ in range(case.layers)
    ]


def written(
    case: Case, rows: dict[tuple[int, int, int, int], bytes], slots: set[int]
) -> list[list[bytearray]]:
    """The engine's memory with the rows of these slots in their places, the sentinel elsewhere."""
    tensors = new_tensors(case)
    for layer, (kind, head, slot) in itertools.product(range(case.layers), case.places()):
        if slot in slots:
            tensor, first = case.place(kind, head, slot)
            tensors[layer][tensor][first : first + case.row_nbytes] = rows[layer, kind, head, slot]
    return tensors


def packed(case: Case, rows: dict[tuple[int, int, int, int], bytes]) -> list[bytearray]:
    """The payload: `[heads, tokens, K then V]` a layer, the sentinel where a token is a hole."""
    hole = bytes([SENTINEL]) * case.row_nbytes
    return [
        bytearray([SENTINEL]) * case.segment_offset
        + b"".join(
            hole if slot == HOLE else rows[layer, kind, head, slot]
            for head in range(case.heads)
            for slot in case.slots
            for kind in range(case.kinds)
        )
        for layer in range(case.layers)
    ]


def address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Call:
    """The ABI's view of a case. Keeps what the structures point to."""

    def __init__(
        self, case: Case, tensors: Sequence[Sequence[bytearray]], segments: Sequence[bytearray]
    ) -> None:
        self._memory = (tensors, segments)
        strides = case.strides
        planes = []
        for layer in tensors:
            for kind in range(case.kinds):
                if kind and "e" in case.axes:
                    continue
                base = address(layer[kind if case.pair else 0]) + case.offset + kind * strides.get("c", 0)
                planes.append(abi.Plane(base, strides.get("h", 0), strides["n"], strides.get("s", 0)))
        self.planes = (abi.Plane * len(planes))(*planes)
        num_planes = len(planes) // case.layers
        row_nbytes = case.kinds * case.row_nbytes // num_planes
        self.layout = abi.Layout(
            ctypes.addressof(self.planes),
            case.layers,
            num_planes,
            case.heads,
            case.num_slots,
            case.block_slots,
            row_nbytes,
        )
        addresses = [address(segment) + case.segment_offset for segment in segments]
        self._segments = (ctypes.c_uint64 * case.layers)(*addresses)
        kind = {"q": ctypes.c_int64, "i": ctypes.c_int32, "": ctypes.c_int64}[case.slot_type]
        self._slots = (kind * len(case.slots))(*case.slots)
        self.frame = abi.Frame(
            ctypes.addressof(self._slots) if case.slot_type else None,
            ctypes.addressof(self._segments),
            ctypes.sizeof(kind),
            case.slots[0],
            len(case.slots),
        )
        self.fault = abi.Fault()
        self._threads = case.threads

    def run(self, library: ctypes.CDLL, name: str) -> int:
        function = getattr(library, name)
        if name.endswith("_twin"):
            bad_slots = ctypes.c_int64()
            status = int(function(self.layout, self.frame, bad_slots))
            assert status != abi.OK or bad_slots.value == 0
            return status
        return int(function(self.layout, self.frame, 1, self._threads, self.fault))


def check(library: ctypes.CDLL, case: Case, seed: int, *, twin: bool) -> None:
    """Gathers and scatters the case, and compares every byte of both sides with the oracle's."""
    rng = random.Random(seed)
    rows = {
        (layer, *place): rng.randbytes(case.row_nbytes)
        for layer, place in itertools.product(range(case.layers), case.places())
    }
    everything = set(range(case.num_slots))
    suffix = "_twin" if twin else ""

    tensors = written(case, rows, everything)
    segments = [bytearray([SENTINEL]) * len(segment) for segment in packed(case, rows)]
    assert Call(case, tensors, segments).run(library, "lmck_gather" + suffix) == abi.OK
    assert segments == packed(case, rows), f"gather: {case}"
    assert tensors == written(case, rows, everything), f"gather wrote the engine's memory: {case}"

    tensors, segments = new_tensors(case), packed(case, rows)
    assert Call(case, tensors, segments).run(library, "lmck_scatter" + suffix) == abi.OK
    assert tensors == written(case, rows, set(case.slots)), f"scatter: {case}"
    assert segments == packed(case, rows), f"scatter wrote the payload: {case}"


def random_case(rng: random.Random, axes: str, *, large: bool = False) -> Case:
    """Odd sizes, offset and padded views, and slots in any order; `large` takes what small calls don't."""
    blocks, block_slots = (rng.randint(20, 40), 16) if large else (rng.randint(1, 5), rng.randint(1, 6))
    case = Case(
        axes=axes,
        layers=rng.randint(1, 3),
        heads=rng.randint(1, 3),
        blocks=blocks,
        block_slots=block_slots,
        row_nbytes=rng.choice([1000, 1024, 1537] if large else [1, 2, 6, 7, 8, 16, 24, 32, 63, 64, 128, 200]),
        paddings={axis: rng.choice([0, 0, 1, 3, 16]) for axis in axes},
        offset=rng.choice([0, 0, 1, 2, 8, 16]),
        segment_offset=rng.choice([0, 0, 1, 4, 64]),
        slot_type=rng.choice("qi"),
        threads=rng.choice([1, 3]),
    )
    if large:  # 5 MiB: past the thresholds of streaming stores and of threads
        case.layers = (5 << 20) // (case.heads * case.num_slots * case.kinds * case.row_nbytes) + 1
        case.threads = 3
    slots = rng.sample(range(case.num_slots), case.num_slots if large else rng.randint(1, case.num_slots))
    way = rng.randrange(4)
    if way == 0:
        slots = list(range(min(slots), case.num_slots))
        case.slot_type = rng.choice(["", "q"])
    elif way == 1:
        slots.sort()  # runs
    elif way == 2:
        slots = [HOLE if rng.random() < 0.3 else slot for slot in slots]
    case.slots = slots
    return case


def narrowed(library: ctypes.CDLL, seed: int) -> bytes:
    """Random bfloat16, odd addresses: as float8 with scales, widened again, and narrowed from that."""
    rng = random.Random(seed)
    dim = rng.choice([1, 7, 64, 128, 129])
    case = Case("nhse", 2, 3, 4, 5, 2 * dim, offset=rng.randint(0, 3), slots=rng.sample(range(20), 13))
    rows = {
        (layer, *place): rng.randbytes(case.row_nbytes)
        for layer, place in itertools.product(range(case.layers), case.places())
    }
    tensors = written(case, rows, set(range(20)))
    segments = [bytearray(case.heads * len(case.slots) * (2 * dim + 8)) for _ in range(case.layers)]
    seen = b""
    for name in ("lmck_gather", "lmck_scatter", "lmck_gather"):
        call = Call(case, tensors, segments)
        call.layout.narrow = dim
        assert call.run(library, name) == abi.OK
        seen += b"".join(bytes(memory) for memory in (*segments, *(t for layer in tensors for t in layer)))
    return seen


def main(path: str, seed: int, cases: int) -> None:
    library = ctypes.CDLL(path)
    abi.declare_host(library)
    best = library.lmck_instructions()
    rng = random.Random(seed)
    narrow_results = set()
    for instructions in (b"baseline", b"avx2", b"avx512"):
        if not library.lmck_use_instructions(instructions):
            continue
        for axes in LAYOUTS.values():
            for number in range(cases):
                check(library, random_case(rng, axes), number, twin=number % 2 == 1)
            if instructions == best:
                check(library, random_case(rng, axes, large=True), seed, twin=False)
        narrow_results.add(b"".join(narrowed(library, number) for number in range(6)))
        pages = bytearray(random.Random(seed).randbytes(70 * 4096))
        library.lmck_checksum(address(pages), len(pages))
        library.lmck_checksum(address(pages), 4096)
        sys.stdout.write(f"{instructions.decode()} ")
    assert len(narrow_results) == 1, "instruction sets narrow differently"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
