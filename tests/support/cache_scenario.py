"""Engines over real tiers with KV whose right bytes anyone can compute, and one check of all invariants."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lmcache_core.config import load_config
from lmcache_core.engine import CacheEngine
from lmcache_core.events import Event
from lmcache_core.identity import ModelRecord, Part
from lmcache_core.registry import Registry, discover
from lmcache_core.tiers import MemoryTier, StorageTier

LAYERS, HEADS, CONTENT = 3, 2, 64
CHUNK = 32

MODEL = ModelRecord(weights="00" * 32, config={"architecture": "test"}, chunk_tokens=CHUNK)
PART = Part(layers=(0, LAYERS), heads=(0, HEADS), content_format="test 64", content_nbytes=CONTENT)


def prompt(seed: int, num_tokens: int) -> array[int]:
    """Distinct tokens for distinct seeds, from the first token on."""
    return array("i", [(seed * 7919 + 13 * i + i * i % 101) % 30_000 for i in range(num_tokens)])


@lru_cache(1 << 10)
def digests_of(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """What each token's KV depends on: itself and all before it."""
    digests = []
    state = b""
    for token in tokens:
        state = blake2b(state + int(token).to_bytes(4, "little"), digest_size=16).digest()
        digests.append(state)
    return tuple(digests)


@lru_cache(1 << 14)  # of some KiB each
def rows_of(digests: tuple[bytes, ...], layer: int) -> bytes:
    rows = []
    for head in range(HEADS):
        for digest in digests:
            row = blake2b(digest + bytes((layer, head)), digest_size=32).digest()
            rows.append(row * (CONTENT // 32))
    return b"".join(rows)


class OracleKV:
    """KV of a request computed from its tokens alone: each token's bytes depend on its whole prefix.

    As a source it writes them; as a target it compares, and remembers what was scattered.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._digests = digests_of(tuple(tokens))
        self.gathered: list[tuple[int, int]] = []
        self.scattered: list[tuple[int, int]] = []

    def expected(self, layer: int, first: int, count: int) -> bytes:
        return rows_of(self._digests[first : first + count], layer)

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        assert len(payload) == LAYERS
        for layer, segment in enumerate(payload):
            segment[:] = self.expected(layer, first_token, num_tokens)
        self.gathered.append((first_token, num_tokens))

    def scatter(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        for layer, segment in enumerate(payload):
            assert bytes(segment) == self.expected(layer, first_token, num_tokens), "KV of other tokens"
        self.scattered.append((first_token, num_tokens))


class BlankKV:
    """KV of zeros, for parts that the oracle doesn't know."""

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        for segment in payload:
            segment[:] = bytes(len(segment))


class LayeredKV(OracleKV):
    """The same, a layer at a time."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.layers: list[tuple[int, int, int]] = []  # (layer, first token, number of tokens) scattered

    def gather_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        segment[:] = self.expected(layer, first_token, num_tokens)

    def wait_gathered(self) -> None:
        """What was gathered is there."""

    def scatter_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        assert bytes(segment) == self.expected(layer, first_token, num_tokens), "KV of other tokens"
        self.layers.append((layer, first_token, num_tokens))

    def good(self, layer: int, num_tokens: int) -> bool:
        """Whether the first `num_tokens` have been scattered for all layers up to `layer`."""
        for each in range(layer + 1):
            pieces = [range(first, first + count) for at, first, count in self.layers if at == each]
            if not set(range(num_tokens)) <= {token for piece in pieces for token in piece}:
                return False
        return True


class Recorder:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def config_of(*tiers: dict[str, object], **settings: object) -> dict[str, object]:
    return {
        "chunk_tokens": CHUNK,
        "memory": {"staging": "4MiB", "huge_pages": False},
        "tiers": list(tiers),
        **settings,
    }


def cpu(**settings: object) -> dict[str, object]:
    return {"name": "cpu", "backend": "cpu", "capacity": "4MiB", **settings}


def disk(path: Path, **settings: object) -> dict[str, object]:
    return {
        "name": "disk",
        "backend": "disk",
        "capacity": "64MiB",
        "options": {"path": str(path)},
        **settings,
    }


def engine_of(
    config: dict[str, object], *, registry: Registry | None = None, recorder: Recorder | None = None
) -> CacheEngine:
    return CacheEngine(
        load_config(config),
        model=MODEL,
        part=PART,
        registry=registry or discover(),
        observers=[recorder] if recorder else [],
    )


def store(engine: CacheEngine, tokens: Sequence[int]) -> int:
    return engine.store(tokens, OracleKV(tokens)).num_tokens


def retrieve(engine: CacheEngine, tokens: Sequence[int], **kwargs: Any) -> int:
    """Retrieves, proving every scattered byte against the oracle. Returns the tokens loaded."""
    kv = OracleKV(tokens)
    result = engine.retrieve(tokens, kv, **kwargs)
    covered = [False] * len(tokens)
    for first, count in kv.scattered:
        covered[first : first + count] = [True] * count
    assert list(result.mask) == covered
    assert result.num_tokens == sum(covered) == sum(result.tokens_by_tier.values())
    return result.num_tokens


def settle(engine: CacheEngine) -> None:
    """Waits for all background work, then checks every tier's contents, bytes, leases and holds."""
    assert engine.flush(20.0), "writes did not drain"
    chain = engine._chain
    eventually(
        lambda: (
            not chain.pool.stats().leases
            and not any(tier.index.stats().reserved_bytes for tier in chain.tiers)
        )
    )
    pool = chain.pool.stats()
    assert pool.leases == 0, "leases are left"
    assert pool.lost_leases == 0, "leases were lost"
    chain.pool.check()
    for tier in chain.tiers:
        index = tier.index
        keys = index.keys()
        stats = index.stats()
        entries = [index.get(key) for key in keys]
        assert stats.entries == len(keys)
        assert stats.used_bytes == sum(entry.stored for entry in entries if entry is not None)
        assert stats.reserved_bytes == 0, "a reservation was leaked"
        if stats.capacity_bytes is not None:
            assert stats.used_bytes <= stats.capacity_bytes
        for key, entry in zip(keys, entries, strict=True):
            assert entry is not None
            assert entry.children == sum(other is not None and other.parent == key for other in entries)
        if isinstance(tier, MemoryTier):
            assert pool.holds == len(keys), "the pool holds what no tier knows"
        else:
            assert isinstance(tier, StorageTier)
            writes = tier.writes
            assert writes.depth() == 0
            left = (writes._active, writes._active_bytes, len(writes._active_keys), len(writes._ready))
            assert left == (0, 0, 0, 0), "a batch was ended twice, or never"


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Waits, for background threads that tell nobody when they are done."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.002)
    return True
