"""Lookup, memory tier and import: the paths that run on every request.

    python benchmarks/engine_paths.py

Prints medians over interleaved rounds, each beside what bounds it: hashing alone for a lookup, a dict
look-up of the same keys for a repeated one, bare Python for the import. Exits with 1 when one is missed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np

from lmcache_core.config import load_config
from lmcache_core.engine import CacheEngine
from lmcache_core.frame import FrameHeader, FrameKind, Segment
from lmcache_core.identity import Content, ModelRecord, Part, StorageKey
from lmcache_core.tiers import MemoryTier

TOKENS = 131_072
CHUNK = 256
ROUNDS = 21


missed: list[str] = []


def bound(what: str, value: float, most: float) -> str:
    if value >= most:
        missed.append(what)
    return f"bound {most:g}{'' if value < most else ', MISSED'}"


def median_ms(samples: list[float]) -> str:
    low, middle, high = np.percentile(np.array(samples) * 1e3, [25, 50, 75])
    return f"{middle:8.3f} ms   (quartiles {low:.3f} to {high:.3f})"


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Nothing:
    """KV of no content: only its bookkeeping is measured."""

    def gather(self, first_token: int, num_tokens: int, payload: object) -> None: ...


def lookups() -> None:
    model = ModelRecord(weights="00", config={}, chunk_tokens=CHUNK)
    part = Part(layers=(0, 1), heads=(0, 1), content_format="bench", content_nbytes=8)
    config = load_config(
        {
            "chunk_tokens": CHUNK,
            "memory": {"staging": "16MiB"},
            "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "64MiB"}],
        }
    )
    random = np.random.default_rng(1)
    tokens = random.integers(0, 50_000, TOKENS, dtype=np.int32)
    with CacheEngine(config, model=model, part=part) as engine:
        engine.store(tokens, Nothing())
        assert engine.lookup(tokens).num_tokens == TOKENS
        first, repeated, hashing, gets = [], [], [], []
        keys = engine.content(tokens).keys(part)
        known = dict.fromkeys(keys, 0)
        for _ in range(ROUNDS):
            for _ in range(8):  # others' requests in between, so that the tokens must be hashed again
                engine.lookup(random.integers(0, 50_000, 16, dtype=np.int32))
            hashing.append(timed(lambda: Content(model).extend(tokens)))
            first.append(timed(lambda: engine.lookup(tokens)))
            repeated.append(timed(lambda: engine.lookup(tokens)))
            gets.append(timed(lambda: [known[key] for key in keys]))
    print(f"lookup of {TOKENS} int32 tokens, {len(keys)} chunks, all in the cpu tier")
    first_ms, repeated_ms = 1e3 * statistics.median(first), 1e3 * statistics.median(repeated)
    print(f"  hashing included      {median_ms(first)}   {bound('lookup', first_ms, 2.5)} ms")
    print(f"  hashing alone         {median_ms(hashing)}")
    print(f"  repeated              {median_ms(repeated)}   {bound('repeated lookup', repeated_ms, 0.3)} ms")
    print(f"  dict look-ups alone   {median_ms(gets)}")


def memory_tier(nbytes: int = 32 << 20, frames: int = 8) -> None:
    """Each round fills `frames` frames, then puts and borrows one after the other.

    In turn into a tier with room, and into a full one, where each put evicts a frame.
    """
    config = load_config(
        {
            "chunk_tokens": CHUNK,
            "memory": {"staging": str(2 * frames * nbytes)},
            "tiers": [{"name": "cpu", "backend": "cpu", "capacity": str(frames * nbytes)}],
        }
    )
    part = Part(layers=(0, 1), heads=(0, 1), content_format="bench", content_nbytes=8)
    model = ModelRecord(weights="00", config={}, chunk_tokens=CHUNK)
    cold: list[float] = []
    warm: dict[bool, list[float]] = {False: [], True: []}  # by whether each put evicts
    copies: list[float] = []
    random = Random(1)
    source = bytearray(nbytes)
    with CacheEngine(config, model=model, part=part) as engine:
        chain = engine._chain
        (tier,) = chain.tiers
        assert isinstance(tier, MemoryTier)
        for number in range(2 * ROUNDS):
            full = number % 2 == 1
            if not full:
                tier.remove(tier.index.keys(), "cleared")
            batch = []
            for _ in range(frames):
                frame = chain.allocate(chunk_header(part, random, nbytes), time.monotonic() + 1)
                assert frame is not None
                copies.append(timed(partial(frame.lease.memory.__setitem__, slice(None), source)))
                batch.append(frame)
            for position, frame in enumerate(batch):
                started = time.perf_counter()
                tier.store(frame)
                borrowed = tier.borrow(frame.key, "benchmark")
                elapsed = time.perf_counter() - started
                (warm[full] if position else cold).append(elapsed)
                assert borrowed is not None
                borrowed.release()
                frame.release()
    micro = statistics.median(warm[False]) * 1e6
    print(f"cpu tier, put + borrow of a {nbytes >> 20} MiB frame")
    print(f"  no byte moves         {micro:8.1f} us   {bound('put + borrow', micro, 20)} us")
    print(f"  evicting another      {statistics.median(warm[True]) * 1e6:8.1f} us")
    print(f"  with cold CPU caches  {statistics.median(cold) * 1e6:8.1f} us   (right after filling 256 MiB)")
    print(f"  one plain copy        {statistics.median(copies) * 1e6:8.1f} us")


def chunk_header(part: Part, random: Random, nbytes: int) -> FrameHeader:
    return FrameHeader(
        kind=FrameKind.CHUNK,
        key=StorageKey(f"c-{part.digest}-{random.randbytes(32).hex()}"),
        parent=None,
        part=part.digest,
        content_format="bench",
        first_token=0,
        num_tokens=CHUNK,
        segments=(Segment(nbytes - 4096, nbytes - 4096),),
    )


def imports() -> None:
    code = "import lmcache_core, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare.append(timed(lambda: subprocess.run([sys.executable, "-c", ""], check=True)))
        ours.append(timed(lambda: subprocess.run([sys.executable, "-c", code], check=True)))
    print("import lmcache_core, without torch and numpy")
    over_ms = 1e3 * (statistics.median(ours) - statistics.median(bare))
    print(f"  over bare Python      {over_ms:8.3f} ms   {bound('import', over_ms, 100)} ms")
    print(f"  bare Python           {median_ms(bare)}")


if __name__ == "__main__":
    lookups()
    memory_tier()
    imports()
    sys.exit(bool(missed))
