"""Disk reads and writes of 32 MiB frames, beside a bare loop of direct I/O on the same file system.

    python benchmarks/disk.py [--directory DIR] [--pairs 10] [--layouts] [--output FILE]

Ours is one batch of frames through executor and disk backend, from `submit` until the last frame is settled;
a frame that was read is verified (header, key, every checksum) on another thread while the next one is read.
Bare is a loop of `os.preadv` or `os.pwritev` with O_DIRECT, one call a frame, over files that lie open. Three
cases: reads; writes in steady state (ours into recycled slots, bare in place over existing files); writes of
a first fill (both into new files). Each pair runs ours and bare in turn, in changing order; a ratio is the
median over the pairs of ours to bare, with its quartiles. Exits with 1 below 0.9 for reads or 0.8 for writes.

`--layouts` compares instead the ways a value could be laid out on the disk (docs/adr/0004-disk-slots.md).

Uses up to 2 GiB in DIR (a new directory beside this repository's files when not given), and deletes it.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.events import EventBus
from lmcache_core.frame import FrameHeader, FrameKind, Segment, seal
from lmcache_core.identity.keys import chunk_key
from lmcache_core.memory import Lease, MemoryPool
from lmcache_core.storage import (
    Breaker,
    Item,
    Job,
    Operation,
    Outcome,
    Priority,
    RetryBudget,
    Status,
    TierExecutor,
    TierHost,
    Verifier,
    View,
)
from lmcache_core_disk.backend import DiskBackend
from lmcache_core_disk.config import DiskConfig

PART = "0123456789abcdef"
FRAME_NBYTES = 32 << 20
NUM_FRAMES = 8
NUM_SEGMENTS = 8
BOUNDS = {"read": 0.9, "write, steady state": 0.8, "write, first fill": 0.8}


class TimedJob(Job):
    """Notes when its last item was settled."""

    def __init__(self, operation: Operation, items: Sequence[Item]) -> None:
        self.operation = operation
        self.priority = Priority.LOAD
        self.deadline = time.monotonic() + 60
        self.num_items = len(items)
        self.nbytes = sum(item.nbytes for item in items)
        self.settled_at = 0.0
        self.done = threading.Event()
        self._items = items
        self._left = len(items)

    def prepare(self) -> Sequence[Item]:
        return self._items

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        if outcome.status is not Status.OK:
            raise SystemExit(f"{self.operation.value} of frame {index}: {outcome}")
        self._left -= 1
        if not self._left:
            self.settled_at = time.perf_counter()

    def landed(self, index: int, outcome: Outcome) -> None:
        raise SystemExit("a call was late")

    def finished(self) -> None:
        self.done.set()


class Ours:
    """An executor over a disk backend of its own directory."""

    def __init__(self, path: Path, pool: MemoryPool, verifier: Verifier) -> None:
        host = TierHost(
            tier="disk",
            deadline_s=60,
            max_in_flight=4,
            capacity_bytes=(NUM_FRAMES + 2) * (FRAME_NBYTES + (1 << 20)),
            parts=(PART,),
            pool=pool,
            on_lost=lambda copies, reason: None,
            on_lost_all=lambda reason: None,
        )
        self.backend = DiskBackend(DiskConfig(path=path))
        self.executor = TierExecutor(
            self.backend,
            host,
            max_in_flight=4,
            in_flight_bytes=2 * NUM_FRAMES * FRAME_NBYTES,
            queue_limit=16,
            read_breaker=Breaker(failures=5, cool_down_s=5),
            write_breaker=Breaker(failures=5, cool_down_s=5),
            retry=RetryBudget(),
            verifier=verifier,
            events=EventBus(),
        )
        self.executor.open(time.monotonic() + 30)
        if not self.backend.stats().counters["direct_io"]:
            raise SystemExit("this file system refuses direct I/O: nothing to compare with")

    def run(self, operation: Operation, items: Sequence[Item]) -> float:
        job = TimedJob(operation, items)
        start = time.perf_counter()
        self.executor.submit(job)
        job.done.wait()
        return job.settled_at - start

    def close(self) -> None:
        self.executor.close(time.monotonic() + 30)


class Bare:
    """Files that lie open, read and written by one system call a frame."""

    def __init__(self, path: Path, frames: Sequence[memoryview], *, write: bool) -> None:
        path.mkdir()
        self._frames = frames
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self._fds = [os.open(path / f"{index}", flags, 0o600) for index in range(len(frames))]
        if write:
            self.write()

    def write(self) -> float:
        start = time.perf_counter()
        for fd, frame in zip(self._fds, self._frames, strict=True):
            if os.pwritev(fd, [frame], 0) != len(frame):
                raise SystemExit("short write")
        return time.perf_counter() - start

    def read(self) -> float:
        start = time.perf_counter()
        for fd, frame in zip(self._fds, self._frames, strict=True):
            if os.preadv(fd, [frame], 0) != len(frame):
                raise SystemExit("short read")
        return time.perf_counter() - start

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def build_items(pool: MemoryPool) -> tuple[list[Item], list[Lease]]:
    """Sealed frames of different contents, and the leases on their memory."""
    layer, first = FRAME_NBYTES // NUM_SEGMENTS, FRAME_NBYTES // NUM_SEGMENTS - 4096  # the header's page
    segments = (Segment(first, first), *[Segment(layer, layer)] * (NUM_SEGMENTS - 1))
    items, leases = [], []
    for index in range(NUM_FRAMES):
        key = chunk_key(PART, index.to_bytes(32))
        header = FrameHeader(
            kind=FrameKind.CHUNK,
            key=key,
            parent=items[-1].key if items else None,
            part=PART,
            content_format="kv bf16 128",
            first_token=256 * index,
            num_tokens=256,
            segments=segments,
        )
        assert header.frame_nbytes == FRAME_NBYTES
        lease = pool.allocate(header.frame_nbytes, owner="benchmark", deadline=time.monotonic() + 5)
        pattern = random.Random(index).randbytes(1 << 20)
        for offset in range(0, lease.nbytes, len(pattern)):
            lease.memory[offset : offset + len(pattern)] = pattern[: lease.nbytes - offset]
        seal(lease.memory, header)
        items.append(Item(key, (View(lease.address, lease.nbytes, pool.buffer, lease.offset),)))
        leases.append(lease)
    return items, leases


@contextmanager
def first_fill(
    root: Path, pool: MemoryPool, verifier: Verifier, items: Sequence[Item], frames: Sequence[memoryview]
) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Both sides with nothing on the disk yet; opening and deleting is not timed."""
    ours, bare = Ours(root / "fill", pool, verifier), Bare(root / "fill-bare", frames, write=False)
    try:
        yield lambda: ours.run(Operation.PUT, items), bare.write
    finally:
        ours.close()
        bare.close()
        shutil.rmtree(root / "fill")
        shutil.rmtree(root / "fill-bare")


def measure(root: Path, pairs: int) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Seconds (ours, bare) of each pair of each case, and the backend's counters at the end."""
    pool = MemoryPool((NUM_FRAMES + 2) * (FRAME_NBYTES + (2 << 20)))
    items, leases = build_items(pool)
    frames = [lease.memory for lease in leases]
    verifier = Verifier()
    ours, bare = Ours(root / "ours", pool, verifier), Bare(root / "bare", frames, write=True)
    ours.run(Operation.PUT, items)
    ours.run(Operation.PUT, items)  # from here on every put finds a slot to recycle
    cases = {
        "read": (lambda: ours.run(Operation.GET, items), bare.read),
        "write, steady state": (lambda: ours.run(Operation.PUT, items), bare.write),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in BOUNDS}
    for pair in range(pairs + 1):
        for name in BOUNDS:
            if name in cases:
                result = in_turn(*cases[name], pair)
            else:
                with first_fill(root, pool, verifier, items, frames) as (put, write):
                    result = in_turn(put, write, pair)
            if pair:  # the first warms up
                times[name].append(result)
    counters = ours.backend.stats().counters
    ours.close()
    bare.close()
    verifier.close()
    for lease in leases:
        lease.release()
    return times, counters


def in_turn(ours: Callable[[], float], bare: Callable[[], float], pair: int) -> tuple[float, float]:
    if pair % 2:
        return ours(), bare()
    bare_s = bare()
    return ours(), bare_s


def report(times: dict[str, list[tuple[float, float]]], counters: dict[str, int]) -> tuple[str, bool]:
    nbytes = NUM_FRAMES * FRAME_NBYTES
    lines = [
        machine_line(f"{NUM_FRAMES} frames of {FRAME_NBYTES >> 20} MiB a run, {len(times['read'])} pairs"),
        "",
        f"{'case':22}{'ours GB/s':>11}{'bare GB/s':>11}{'ratio':>7}  quartiles     bound",
    ]
    met = True
    for name, pairs in times.items():
        ratios = [bare / ours for ours, bare in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        ours_s, bare_s = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ok = middle >= BOUNDS[name]
        met &= ok
        lines.append(
            f"{name:22}{nbytes / ours_s / 1e9:11.2f}{nbytes / bare_s / 1e9:11.2f}{middle:7.2f}  "
            f"{low:.2f} to {high:.2f}  {BOUNDS[name]} {'met' if ok else 'MISSED'}"
        )
    lines += [
        "",
        f"slots of the steady state: {counters['new_slots']} new, {counters['recycled_slots']} recycled",
        "direct I/O on both sides; reads verified, frame i while i+1 is read",
    ]
    return "\n".join(lines), met


def machine_line(what: str) -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}: {what}"


def compare_layouts(root: Path, pairs: int) -> str:
    """GB/s of one 32 MiB value in each layout: median, best and worst of interleaved rounds."""
    pool = MemoryPool(2 * FRAME_NBYTES)
    lease = pool.allocate(FRAME_NBYTES, owner="benchmark", deadline=time.monotonic() + 5)
    memory = lease.memory
    memory[:] = random.Random(0).randbytes(1 << 20) * (FRAME_NBYTES >> 20)
    direct = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    files = [os.open(root / f"slot{index}", direct, 0o600) for index in range(NUM_FRAMES)]
    for fd in files:
        os.pwritev(fd, [memory], 0)
    slab = os.open(root / "slab", direct, 0o600)
    for index in range(NUM_FRAMES):
        os.pwritev(slab, [memory], index * FRAME_NBYTES)
    new: list[Path] = []

    def new_file(round_: int, *, allocate: bool = False, rename: bool = False) -> None:
        path = root / f"new{len(new)}"
        new.append(path)
        fd = os.open(path, direct, 0o600)
        if allocate:
            os.posix_fallocate(fd, 0, FRAME_NBYTES)
        os.pwritev(fd, [memory], 0)
        os.close(fd)
        if rename:
            os.rename(path, root / "renamed")

    def recycled_opened(round_: int) -> None:
        fd = os.open(root / f"slot{round_ % NUM_FRAMES}", os.O_WRONLY | os.O_DIRECT)
        os.pwritev(fd, [memory], 0)
        os.close(fd)

    def read_opened(round_: int) -> None:
        fd = os.open(root / f"slot{round_ % NUM_FRAMES}", os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [memory], 0)
        os.close(fd)

    def slab_offset(round_: int) -> int:
        return round_ % NUM_FRAMES * FRAME_NBYTES

    layouts: dict[str, Callable[[int], object]] = {
        "write, new file": new_file,
        "write, new file, fallocate first": lambda n: new_file(n, allocate=True),
        "write, new file renamed over another": lambda n: new_file(n, rename=True),
        "write, recycled file, open": lambda n: os.pwritev(files[n % NUM_FRAMES], [memory], 0),
        "write, recycled file, opened for it": recycled_opened,
        "write, slot in a slab file": lambda n: os.pwritev(slab, [memory], slab_offset(n)),
        "read, file, open": lambda n: os.preadv(files[n % NUM_FRAMES], [memory], 0),
        "read, file, opened for it": read_opened,
        "read, slot in a slab file": lambda n: os.preadv(slab, [memory], slab_offset(n)),
    }
    rates: dict[str, list[float]] = {name: [] for name in layouts}
    order = list(layouts)
    for number in range(pairs + 1):
        random.Random(number).shuffle(order)
        for name in order:
            start = time.perf_counter()
            layouts[name](number)
            if number:
                rates[name].append(FRAME_NBYTES / (time.perf_counter() - start) / 1e9)
            for path in new:
                path.unlink(missing_ok=True)
            new.clear()
    for fd in (*files, slab):
        os.close(fd)
    lease.release()
    lines = [machine_line(f"one value of {FRAME_NBYTES >> 20} MiB, {pairs} interleaved rounds"), ""]
    lines += [f"{'layout':40}{'GB/s':>6}  worst to best"]
    for name, values in rates.items():
        lines.append(f"{name:40}{statistics.median(values):6.2f}  {min(values):.2f} to {max(values):.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where to measure; a new directory is made in it")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--layouts", action="store_true", help="compare ways of laying out a value")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    parent = args.directory or Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=".disk-benchmark-") as folder:
        if args.layouts:
            text, met = compare_layouts(Path(folder), args.pairs), True
        else:
            text, met = report(*measure(Path(folder), args.pairs))
    print(text)
    if args.output is not None:
        args.output.write_text(f"# Disk, beside bare direct I/O\n\n```\n{text}\n```\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
