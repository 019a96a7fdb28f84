"""Gather and scatter of 32 MiB frames from 16-token pages, beside plain copies of the same bytes.

    python benchmarks/kernels.py [--rounds 21] [--output FILE]

An 8B shape: 32 layers, 8 KV heads of 128, bf16; 256 tokens a frame, in random pages of an engine's 8,192
tokens (1 GiB). All ways run in turn in each round, in changing order, each on other pages and into one of
four frames, on one thread. Its CPU time is taken: nothing here waits, and other jobs of the machine count
less. The plain copies are C, compiled here for this processor: one memcpy of 32 MiB, and a loop over the
same 512 pages of 64 KiB with memcpy and with non-temporal stores. Of each way the quicker quartile counts,
since other jobs only ever slow a copy; the ratio is ours to the loop with non-temporal stores. Then the
call's overhead, the checksum, and a store and retrieve of 4,096 tokens through the cpu tier beside two plain
copies of as many bytes (wall time).

Exits with 1 below 0.9 of the page loop, above 20 us of overhead a call, or below 0.8 of two plain copies.
Overhead of a call for many frames is its time without the library's function, which checks and copies.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lmcache_core.engine import CacheEngine
from lmcache_core.frame import segment_checksum
from lmcache_core.identity import ModelRecord, Part
from lmcache_core.kernels import PagedKV
from lmcache_core.kernels.compiled import planes_of
from lmcache_core.kernels.layout import blocks_layout, pairs_layout
from lmcache_core.kernels.reference import ReferenceMover
from lmcache_core_kernels import abi, build_info

LAYERS, HEADS, DIM, PAGE_TOKENS, FRAME_TOKENS, CONTEXT = 32, 8, 128, 16, 256, 8192
TOKEN_NBYTES = HEADS * 2 * DIM * 2
LAYER_NBYTES = FRAME_TOKENS * TOKEN_NBYTES
FRAME_NBYTES = LAYERS * LAYER_NBYTES
PAGE_NBYTES = PAGE_TOKENS * TOKEN_NBYTES
PAGES = CONTEXT // PAGE_TOKENS
NUM_FRAMES = 4
MAX_OVERHEAD_US, MIN_RATIO, MIN_ROUND_TRIP = 20.0, 0.9, 0.8

SHAPES = {
    "packed [nb, h, bs, 2d]": ("nhse", (PAGES, HEADS, PAGE_TOKENS, 2 * DIM)),
    "packed [nb, bs, h, 2d]": ("nshe", (PAGES, PAGE_TOKENS, HEADS, 2 * DIM)),
    "[2, nb, bs, h, d]": ("cnshd", (2, PAGES, PAGE_TOKENS, HEADS, DIM)),
    "[nb, 2, bs, h, d]": ("ncshd", (PAGES, 2, PAGE_TOKENS, HEADS, DIM)),
    "[2, nb, h, bs, d]": ("cnhsd", (2, PAGES, HEADS, PAGE_TOKENS, DIM)),
    "pools [tokens, h, d]": ("thd", (2, CONTEXT, HEADS, DIM)),
    "pairs [h, tokens, d], in a row": ("htd", (2, HEADS, CONTEXT, DIM)),
}


def huge(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    torch.frombuffer(view, dtype=torch.uint8).fill_(1)
    return view


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def plain_copies() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "plain_copy.so"
        source = Path(__file__).with_name("plain_copy.c")
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, "-o", library, source], check=True)
        loaded = ctypes.CDLL(str(library))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loaded.pages.argtypes = [pointer] * 3 + [count] * 5 + [ctypes.c_int] * 2
    return loaded


def timed(function: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    started = clock()
    function()
    return clock() - started


# What to time, prepared for a frame and these pages.
Way = Callable[[int, Sequence[int]], Callable[[], object]]


class Bench:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.missed: list[str] = []
        self.plain = plain_copies()
        self.engine = huge(LAYERS * CONTEXT * TOKEN_NBYTES)
        self.frames = [huge(FRAME_NBYTES) for _ in range(NUM_FRAMES)]
        self.segments = [
            [frame[i : i + LAYER_NBYTES] for i in range(0, FRAME_NBYTES, LAYER_NBYTES)]
            for frame in self.frames
        ]
        self.elements = torch.frombuffer(self.engine, dtype=torch.bfloat16).view(LAYERS, -1)
        self.random = random.Random(1)

    def bound(self, what: str, value: float, limit: float, *, at_least: bool) -> str:
        met = value >= limit if at_least else value <= limit
        if not met:
            self.missed.append(what)
        return f"{limit:g} {'met' if met else 'MISSED'}"

    def page_loop(
        self, frame: int, pages: Sequence[int], *, gather: bool, stream: bool
    ) -> Callable[[], None]:
        index = (ctypes.c_int64 * len(pages))(*pages)
        packed, paged = address(self.frames[frame]), address(self.engine)
        arguments = (
            index,
            len(pages),
            PAGE_NBYTES,
            LAYERS,
            LAYER_NBYTES,
            CONTEXT * TOKEN_NBYTES,
            gather,
            stream,
        )
        return partial(self.plain.pages, packed, paged, *arguments)

    def memcpy(self, frame: int, pages: Sequence[int], *, gather: bool) -> Callable[[], object]:
        inside = address(self.engine) + pages[0] % (PAGES // 2) * PAGE_NBYTES
        outside = address(self.frames[frame])
        return partial(ctypes.memmove, *((outside, inside) if gather else (inside, outside)), FRAME_NBYTES)

    def layout(self, name: str, gather: bool) -> str:
        axes, shape = SHAPES[name]
        layers = [layer.view(shape) for layer in self.elements]
        if "t" in axes:
            keys, values = [layer[0] for layer in layers], [layer[1] for layer in layers]
            kv, plan = PagedKV.from_pairs(keys, values, axes=axes), pairs_layout(keys, values, axes, 0)
        else:
            kv, plan = PagedKV.from_blocks(layers, axes=axes), blocks_layout(layers, axes)
        reference = ReferenceMover(plan)

        def ours(frame: int, pages: Sequence[int]) -> Callable[[], None]:
            move = kv.gather if gather else kv.scatter
            return partial(move, slots(pages, axes), self.segments[frame])

        def torch_way(frame: int, pages: Sequence[int]) -> Callable[[], None]:
            return partial(reference.move, [(slots(pages, axes), self.segments[frame])], gathering=gather)

        ways: dict[str, Way] = {
            "ours": ours,
            "torch": torch_way,
            "loop": partial(self.page_loop, gather=gather, stream=True),
            "cached loop": partial(self.page_loop, gather=gather, stream=False),
            "memcpy": partial(self.memcpy, gather=gather),
        }
        seconds = self.interleaved(ways)
        quick = {way: statistics.quantiles(taken, n=4)[0] for way, taken in seconds.items()}
        ratio = quick["loop"] / quick["ours"]
        middle = statistics.median(
            loop / own for own, loop in zip(seconds["ours"], seconds["loop"], strict=True)
        )
        rates = [f"{FRAME_NBYTES / quick[way] / 1e9:.1f}" for way in ways]
        factor = quick["torch"] / quick["ours"]
        verb = "gather" if gather else "scatter"
        verdict = self.bound(f"{verb} {name}", ratio, MIN_RATIO, at_least=True)
        cells = [name, verb, *rates, f"{ratio:.2f} ({middle:.2f}), {verdict}", f"{factor:.1f}x"]
        return "| " + " | ".join(cells) + " |"

    def interleaved(self, ways: dict[str, Way]) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        order = list(ways)
        for turn in range(-2, self.rounds):
            self.random.shuffle(order)
            for way in order:
                pages = self.random.sample(range(PAGES), FRAME_TOKENS // PAGE_TOKENS)
                elapsed = timed(ways[way](turn % NUM_FRAMES, pages))
                if turn >= 0:  # the first two turns warm up
                    seconds[way].append(elapsed)
        return seconds

    def overhead(self) -> Iterator[str]:
        """One token of one head of 8 bytes in each of 32 layers: next to nothing is moved."""
        tiny = [torch.zeros(64, 1, 4, 2, dtype=torch.float32) for _ in range(LAYERS)]
        kv = PagedKV.from_blocks(tiny, axes="nhse")
        memory = memoryview(bytearray(8 * LAYERS * 16))
        segments = [memory[i : i + 8] for i in range(0, 8 * LAYERS, 8)]
        frames = [
            (range(f, f + 1), [memory[i : i + 8] for i in range(f * 8 * LAYERS, (f + 1) * 8 * LAYERS, 8)])
            for f in range(16)
        ]
        index = torch.tensor([77])
        calls: dict[str, Callable[[], object]] = {
            "gather": lambda: kv.gather(index, segments),
            "scatter, read-only payload": partial(
                kv.scatter, index, [segment.toreadonly() for segment in segments]
            ),
            MANY: lambda: kv.gather_many(frames),
            "of that, the library's own check and copy": library_call(tiny, memory, len(frames)),
        }
        micro = {name: sorted(timed(call) * 1e6 for _ in range(2000)) for name, call in calls.items()}
        middle = {name: statistics.median(values) for name, values in micro.items()}
        *timed_calls, alone = calls
        for name in calls:
            low, high = micro[name][500], micro[name][1500]
            cell = f"{middle[name]:.1f} us ({low:.1f}–{high:.1f})"
            if name in timed_calls:
                beside = middle[name] - (middle[alone] if name == MANY else 0.0)
                verdict = self.bound(name, beside, MAX_OVERHEAD_US, at_least=False)
                cell += f", {beside:.1f} of overhead, at most {verdict}"
            yield f"| {name} | {cell} |"

    def checksum(self) -> str:
        seconds = [
            timed(lambda f=turn: [segment_checksum(s) for s in self.segments[f % NUM_FRAMES]])  # type: ignore[misc]
            for turn in range(self.rounds)
        ]
        return f"{statistics.median(seconds) * 1e3:.2f} ms for 32 segments of 1 MiB"

    def round_trip(self, num_tokens: int = 4096) -> Iterator[str]:
        nbytes = num_tokens * TOKEN_NBYTES * LAYERS
        kv = PagedKV.from_blocks([layer.view(SHAPES[PACKED][1]) for layer in self.elements], axes="nhse")
        config = {
            "chunk_tokens": FRAME_TOKENS,
            "memory": {"staging": "96MiB"},
            "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "768MiB"}],
        }
        part = Part(
            layers=(0, LAYERS),
            heads=(0, HEADS),
            content_format=kv.content_format,
            content_nbytes=kv.content_nbytes,
        )
        model = ModelRecord(weights="00", config={}, chunk_tokens=FRAME_TOKENS)
        copies, trips, stores, loads = [], [], [], []
        target = huge(nbytes)
        with CacheEngine(config, model=model, part=part) as engine:
            for turn in range(-2, self.rounds):
                tokens = torch.randint(0, 50_000, (num_tokens,), dtype=torch.int32).numpy()
                pages = self.random.sample(range(PAGES), num_tokens // PAGE_TOKENS)
                source = Paged(kv, slots(pages, "nhse"))
                at, to = address(self.engine), address(target)
                wall = partial(timed, clock=time.perf_counter)  # the engine has threads of its own
                copy = wall(partial(ctypes.memmove, to, at, nbytes)) + wall(
                    partial(ctypes.memmove, at, to, nbytes)
                )
                store = wall(partial(engine.store, tokens, source))
                load = wall(partial(engine.retrieve, tokens, source))
                assert engine.lookup(tokens).num_tokens == num_tokens
                engine.clear()
                if turn >= 0:
                    copies.append(copy)
                    trips.append(store + load)
                    stores.append(store)
                    loads.append(load)
        low, ratio, high = statistics.quantiles([c / t for c, t in zip(copies, trips, strict=True)], n=4)
        verdict = self.bound("round trip", ratio, MIN_ROUND_TRIP, at_least=True)
        for name, seconds, times in (
            ("store", stores, 1),
            ("retrieve", loads, 1),
            ("two plain copies", copies, 2),
        ):
            yield f"| {name} | {times * nbytes / statistics.median(seconds) / 1e9:.1f} GB/s |"
        yield f"| store and retrieve, of two plain copies | {ratio:.2f} ({low:.2f}–{high:.2f}), {verdict} |"


PACKED = "packed [nb, h, bs, 2d]"
MANY = "gather_many, 16 frames (512 views)"


def library_call(layers: Sequence[Tensor], memory: memoryview, num_frames: int) -> Callable[[], object]:
    """`lmck_gather` of a token a frame, with all that it is given ready."""
    layout = blocks_layout(layers, "nhse")
    planes = [abi.Plane(*plane) for layer in planes_of(layout) for plane in layer]
    table = (abi.Plane * len(planes))(*planes)
    shape = (layout.num_heads, layout.num_slots, layout.block_slots, layout.row_nbytes, 0)
    described = abi.Layout(ctypes.addressof(table), len(layers), 1, *shape)
    count = num_frames * len(layers)
    segments = (ctypes.c_uint64 * count)(*(address(memory) + i * layout.row_nbytes for i in range(count)))
    frames = (abi.Frame * num_frames)()
    for i, frame in enumerate(frames):
        frame.segments = ctypes.addressof(segments) + i * len(layers) * 8
        frame.first_slot, frame.num_tokens = i, 1
    held = (table, segments)  # what the structures point to
    gather = abi.host_library().lmck_gather
    return lambda: (gather(described, frames, num_frames, 1, None), held)


class Paged:
    """An engine's request: token i lies in `slots[i]`."""

    def __init__(self, kv: PagedKV, slots: Tensor | range) -> None:
        self._kv = kv
        self._slots = slots

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        self._kv.gather(self._slots[first_token : first_token + num_tokens], payload)

    def scatter(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        self._kv.scatter(self._slots[first_token : first_token + num_tokens], payload)


def slots(pages: Sequence[int], axes: str) -> Tensor | range:
    """Of the tokens in these pages; Transformers' tokens lie in a row."""
    if axes == "htd":
        first = pages[0] % (PAGES // 2) * PAGE_TOKENS
        return range(first, first + FRAME_TOKENS)
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()


def report(bench: Bench) -> Iterator[str]:
    yield f"`python benchmarks/kernels.py --rounds {bench.rounds}`: one thread, torch {torch.__version__},"
    yield f"Python {platform.python_version()}, {cpu_name()}. {build_info()}."
    yield ""
    yield "GB/s of each way's quicker quartile. Ratio: ours to the page loop with non-temporal stores, of the"
    yield "quicker quartiles (median over the rounds)."
    yield ""
    yield "| layout | | ours | torch | pages, NT | pages, memcpy | memcpy | ratio, at least | over torch |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in SHAPES:
        for gather in (True, False):
            yield bench.layout(name, gather)
    yield ""
    yield "| one call, 32 layers, next to nothing moved | median (quartiles) |"
    yield "|---|---|"
    yield from bench.overhead()
    yield ""
    yield f"Segment checksum: {bench.checksum()}."
    yield ""
    yield "| 4,096 tokens (512 MiB) through the cpu tier, packed pages in random order | |"
    yield "|---|---|"
    yield from bench.round_trip()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="interleaved repetitions of every way")
    parser.add_argument("--output", type=Path, help="also write the tables here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.rounds)
    lines = []
    for line in report(bench):
        print(line, flush=True)
        lines.append(line)
    if options.output:
        options.output.write_text("\n".join(["# Kernels", "", *lines, ""]))
    print("missed: " + ", ".join(bench.missed) if bench.missed else "all bounds met")
    return bool(bench.missed)


if __name__ == "__main__":
    sys.exit(main())
