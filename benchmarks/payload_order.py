"""Which payload order is quicker to gather and scatter: K and V of a token adjacent, or apart?

    python benchmarks/payload_order.py [--pairs 15] [--output FILE]

Compares `[layers, heads, tokens, 2 x dim]` (joined) with `[layers, 2, heads, tokens, dim]` (split): one
chunk of 256 tokens moved with the same torch operations, one thread, both orders and a plain copy of as many
bytes interleaved. The engine's tensors hold 4,096 tokens and each move takes other ones, into one of four
frames of huge pages, so that little comes from a cache of the CPU that a real engine would not have.
`PagedKV` is timed beside them: it is the joined order with every check.
"""

from __future__ import annotations

import argparse
import mmap
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lmcache_core.kernels import PagedKV

CONTEXT_TOKENS = 4096
CHUNK_TOKENS = 256
BLOCK_SLOTS = 16
NUM_FRAMES = 4


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def layer_nbytes(self) -> int:
        return 2 * self.heads * CHUNK_TOKENS * self.dim * self.dtype.itemsize


SHAPES = (
    Shape("SmolLM2 fp32", 30, 3, 64, torch.float32),
    Shape("SmolLM2 bf16", 30, 3, 64, torch.bfloat16),
    Shape("8B bf16", 32, 8, 128, torch.bfloat16),
)

# A layer's K and V, each [heads, blocks, block slots, dim]; None: K and V don't lie side by side.
Planes = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
Slots = range | torch.Tensor
Segments = list[torch.Tensor]


def transformers_engine(shape: Shape) -> tuple[Planes, PagedKV]:
    size = (1, shape.heads, CONTEXT_TOKENS, shape.dim)
    keys = [torch.ones(size, dtype=shape.dtype) for _ in range(shape.layers)]
    values = [torch.ones(size, dtype=shape.dtype) for _ in range(shape.layers)]
    planes: Planes = [(k[0][:, None], v[0][:, None], None) for k, v in zip(keys, values, strict=True)]
    return planes, PagedKV.from_pairs(keys, values)


def packed_engine(shape: Shape) -> tuple[Planes, PagedKV]:
    size = (CONTEXT_TOKENS // BLOCK_SLOTS, shape.heads, BLOCK_SLOTS, 2 * shape.dim)
    blocks = [torch.ones(size, dtype=shape.dtype) for _ in range(shape.layers)]
    views = [block.permute(1, 0, 2, 3) for block in blocks]
    planes: Planes = [(view[..., : shape.dim], view[..., shape.dim :], view) for view in views]
    return planes, PagedKV.from_blocks(blocks, axes="nhse")


def split_engine(shape: Shape) -> tuple[Planes, PagedKV]:
    size = (2, CONTEXT_TOKENS // BLOCK_SLOTS, BLOCK_SLOTS, shape.heads, shape.dim)
    blocks = [torch.ones(size, dtype=shape.dtype) for _ in range(shape.layers)]
    views = [block.permute(0, 3, 1, 2, 4) for block in blocks]
    planes: Planes = [(view[0], view[1], None) for view in views]
    return planes, PagedKV.from_blocks(blocks, axes="cnshd")


ENGINES = {
    "Transformers pairs": transformers_engine,
    "packed [nb,h,bs,2d]": packed_engine,
    "[2,nb,bs,h,d]": split_engine,
}


def move(paged: torch.Tensor, packed: torch.Tensor, slots: Slots, gather: bool) -> None:
    """Between an engine's `[heads, blocks, block slots, width]` and `[heads, tokens, width]` of a segment."""
    heads, _, block_slots, width = paged.shape
    if isinstance(slots, range):
        if paged.shape[1] == 1:
            inside = paged[:, 0, slots.start : slots.stop]
        else:
            inside = paged[:, slots.start // block_slots : slots.stop // block_slots]
        outside = packed.view(inside.shape)
        _ = outside.copy_(inside) if gather else inside.copy_(outside)
        return
    head_rows, block_rows, slot_rows = (stride // width for stride in paged.stride()[:3])
    rows = slots // block_slots * block_rows + slots % block_slots * slot_rows
    rows = (torch.arange(heads)[:, None] * head_rows + rows).flatten()
    last = sum((n - 1) * s for n, s in zip(paged.shape[:3], (head_rows, block_rows, slot_rows), strict=True))
    table = paged.as_strided((last + 1, width), (width, 1), paged.storage_offset())
    if gather:
        torch.index_select(table, 0, rows, out=packed.flatten(0, 1))
    else:
        table.index_copy_(0, rows, packed.flatten(0, 1))


def move_joined(planes: Planes, segments: Segments, shape: Shape, slots: Slots, gather: bool) -> None:
    for (keys, values, both), segment in zip(planes, segments, strict=True):
        packed = segment.view(shape.dtype).view(shape.heads, CHUNK_TOKENS, 2 * shape.dim)
        if both is not None:
            move(both, packed, slots, gather)
        else:
            move(keys, packed[..., : shape.dim], slots, gather)
            move(values, packed[..., shape.dim :], slots, gather)


def move_split(planes: Planes, segments: Segments, shape: Shape, slots: Slots, gather: bool) -> None:
    for (keys, values, _), segment in zip(planes, segments, strict=True):
        packed = segment.view(shape.dtype).view(2, shape.heads, CHUNK_TOKENS, shape.dim)
        move(keys, packed[0], slots, gather)
        move(values, packed[1], slots, gather)


def huge_frames(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def slot_source(consecutive: bool, seed: int) -> Iterator[Slots]:
    """Endless chunks: consecutive slots, or blocks taken in random order."""
    rng = random.Random(seed)
    num_blocks, per_chunk = CONTEXT_TOKENS // BLOCK_SLOTS, CHUNK_TOKENS // BLOCK_SLOTS
    while True:
        if consecutive:
            for first in range(0, CONTEXT_TOKENS, CHUNK_TOKENS):
                yield range(first, first + CHUNK_TOKENS)
        else:
            blocks = torch.tensor(rng.sample(range(num_blocks), per_chunk))
            yield (blocks[:, None] * BLOCK_SLOTS + torch.arange(BLOCK_SLOTS)).flatten()


@dataclass(frozen=True)
class Measured:
    """Seconds of each way, a list as long as the pairs."""

    joined: list[float]
    split: list[float]
    paged_kv: list[float]
    plain_copy: list[float]


def measure(
    shape: Shape, planes: Planes, kv: PagedKV, consecutive: bool, gather: bool, pairs: int
) -> Measured:
    frame_nbytes = shape.layers * shape.layer_nbytes
    memory = huge_frames((NUM_FRAMES + 1) * frame_nbytes)
    frames = [
        [
            memory[start : start + shape.layer_nbytes]
            for start in range(frame * frame_nbytes, (frame + 1) * frame_nbytes, shape.layer_nbytes)
        ]
        for frame in range(NUM_FRAMES + 1)
    ]
    tensors = [[torch.frombuffer(segment, dtype=torch.uint8) for segment in frame] for frame in frames]
    for frame in tensors:
        for segment in frame:
            segment.fill_(0)
    source = slot_source(consecutive, seed=1)

    def plain_copy(frame: int, _: Slots) -> None:
        for target, origin in zip(tensors[frame], tensors[-1], strict=True):
            target.copy_(origin)

    def paged_kv(frame: int, slots: Slots) -> None:
        (kv.gather if gather else kv.scatter)(slots, frames[frame])

    ways: dict[str, Callable[[int, Slots], None]] = {
        "joined": lambda frame, slots: move_joined(planes, tensors[frame], shape, slots, gather),
        "split": lambda frame, slots: move_split(planes, tensors[frame], shape, slots, gather),
        "paged_kv": paged_kv,
        "plain_copy": plain_copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(-2, pairs):
        random.Random(turn).shuffle(order)
        for name in order:
            slots = next(source)
            started = time.perf_counter()
            ways[name](turn % NUM_FRAMES, slots)
            if turn >= 0:  # the first two turns warm up
                seconds[name].append(time.perf_counter() - started)
    return Measured(**seconds)


def rate(seconds: list[float], nbytes: int) -> str:
    low, middle, high = (nbytes / s / 1e9 for s in statistics.quantiles(seconds, n=4)[::-1])
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def report(pairs: int) -> Iterator[str]:
    yield f"`python benchmarks/payload_order.py --pairs {pairs}`: {CHUNK_TOKENS} tokens, one thread,"
    yield f"torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()}."
    yield ""
    yield "GB/s: median (quartiles). Ratio: median over the interleaved pairs of split / joined seconds;"
    yield "above 1 the joined order is quicker. PagedKV is the shipped code in the joined order."
    yield ""
    yield "| shape | engine | slots | | joined | split | ratio | PagedKV | plain copy |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for shape in SHAPES:
        nbytes = shape.layers * shape.layer_nbytes
        for engine, build in ENGINES.items():
            planes, kv = build(shape)
            for consecutive in (True, False):
                if not consecutive and build is transformers_engine:
                    continue  # its tokens always lie in a row
                for gather in (True, False):
                    m = measure(shape, planes, kv, consecutive, gather, pairs)
                    ratio = statistics.median(s / j for s, j in zip(m.split, m.joined, strict=True))
                    yield (
                        f"| {shape.name} | {engine} | {'in a row' if consecutive else 'random blocks'} "
                        f"| {'gather' if gather else 'scatter'} | {rate(m.joined, nbytes)} "
                        f"| {rate(m.split, nbytes)} | {ratio:.2f} | {rate(m.paged_kv, nbytes)} "
                        f"| {rate(m.plain_copy, nbytes)} |"
                    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="interleaved repetitions of every way")
    parser.add_argument("--output", type=Path, help="also write the table here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    with torch.inference_mode():
        for line in report(options.pairs):
            print(line, flush=True)
            lines.append(line)
    if options.output:
        options.output.write_text("\n".join(["# Payload order", "", *lines, ""]))


if __name__ == "__main__":
    main()
