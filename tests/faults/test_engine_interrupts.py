"""Ctrl-C in an engine's verbs, at every place of the caller's thread where it can come, one at a time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from cache_scenario import CHUNK, LayeredKV, config_of, cpu, engine_of, eventually, prompt, retrieve, store
from faulty_backends import Controls, faulty
from interruption import interrupt_at

from lmcache_core.engine import CacheEngine
from lmcache_core.sdk import Capabilities
from lmcache_core.tiers import MemoryTier, StorageTier

CHUNK_ONLY = prompt(1, CHUNK)
WITH_TAIL = prompt(1, CHUNK + 16)
OTHERS = [prompt(seed, 2 * CHUNK) for seed in (5, 6, 7)]
PATIENCE_S = 20.0
PACKAGES = ("lmcache_core", "threading")
PRIVATE = Capabilities(medium="network", delete=True, scan=True, persistent=True, max_in_flight=2)
RANGED = replace(PRIVATE, ranged=True)
SHARED = Capabilities(medium="network", shared=True, persistent=True, max_in_flight=2)

pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="knows where CPython 3.11 looks for signals"),
    pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace function that another tool has"),
]


Tokens = Sequence[int]


def nothing_stored(engine: CacheEngine, tokens: Tokens) -> None:
    """Both tiers are full of other prompts."""
    engine.clear()
    for other in OTHERS:
        store(engine, other)


def stored(engine: CacheEngine, tokens: Tokens) -> None:
    nothing_stored(engine, tokens)
    store(engine, tokens)


def far_only(engine: CacheEngine, tokens: Tokens) -> None:
    stored(engine, tokens)
    engine.flush(PATIENCE_S)
    engine.clear(search_range=["cpu"])


def pin_and_unpin(engine: CacheEngine, tokens: Tokens) -> None:
    engine.lookup_unpin(engine.lookup(tokens, pin=True, ttl_s=1e-3).lookup_id)


def prefetch(engine: CacheEngine, tokens: Tokens) -> None:
    engine.prefetch(tokens).wait(PATIENCE_S)


def store_layers(engine: CacheEngine, tokens: Tokens) -> None:
    list(engine.store_layers(tokens, LayeredKV(tokens)))


def retrieve_layers(engine: CacheEngine, tokens: Tokens) -> None:
    list(engine.retrieve_layers(tokens, LayeredKV(tokens)))


def clear(engine: CacheEngine, tokens: Tokens) -> None:
    engine.clear(tokens)


Step = Callable[[CacheEngine, Tokens], object]
SCENARIOS: dict[str, tuple[Capabilities, Tokens, Step, Step]] = {
    "store into full tiers": (PRIVATE, CHUNK_ONLY, nothing_stored, store),
    "store into a shared tier": (SHARED, CHUNK_ONLY, nothing_stored, store),
    "store by layers": (PRIVATE, CHUNK_ONLY, nothing_stored, store_layers),
    "load and promote": (PRIVATE, WITH_TAIL, far_only, retrieve),
    "load from a shared tier": (SHARED, WITH_TAIL, far_only, retrieve),
    "load from memory": (PRIVATE, WITH_TAIL, stored, retrieve),
    "load by layers": (RANGED, WITH_TAIL, far_only, retrieve_layers),
    "load by layers from memory": (PRIVATE, CHUNK_ONLY, stored, retrieve_layers),
    "pin": (PRIVATE, CHUNK_ONLY, stored, pin_and_unpin),
    "clear": (PRIVATE, CHUNK_ONLY, stored, clear),
    "prefetch": (PRIVATE, CHUNK_ONLY, far_only, prefetch),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_after_ctrl_c_anywhere_the_next_calls_work_and_all_books_agree(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)  # some of it comes inside `__del__`
    capabilities, tokens, prepare, work = SCENARIOS[scenario]
    controls = Controls()
    controls.capabilities = capabilities
    far = {"name": "far", "backend": "faulty", "capacity": "128KiB", "deadline": PATIENCE_S}
    number = 0
    with engine_of(config_of(cpu(capacity="96KiB"), far), registry=faulty(controls)) as engine:
        while True:
            prepare(engine, tokens)
            quiet(engine)
            where = interrupt_at(number, PACKAGES, lambda: work(engine, tokens))
            if where is None:
                break
            place = f"{where} (number {number})"
            books_agree(engine, place)
            store(engine, tokens)
            quiet(engine)
            assert retrieve(engine, tokens) == len(tokens), place
            books_agree(engine, place)
            number += 1
    assert number > 20


def test_ctrl_c_while_closing_closes_everything_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    number = 0
    while True:
        controls = Controls()
        far = {"name": "far", "backend": "faulty", "capacity": "128KiB", "deadline": PATIENCE_S}
        engine = engine_of(config_of(cpu(capacity="96KiB"), far), registry=faulty(controls))
        store(engine, CHUNK_ONLY)
        where = interrupt_at(number, PACKAGES, engine.close)
        if where is None:
            break
        if not where.startswith(("CacheEngine.", "TierChain.close:")):  # it had begun
            assert eventually(lambda: controls.calls["close"] > 0), where  # noqa: B023
            assert engine.lookup(CHUNK_ONLY).num_tokens == 0, where
        engine.close()
        assert eventually(lambda: controls.calls["close"] > 0), where  # noqa: B023
        assert engine.stats().memory.leases == 0, where
        number += 1
    assert number > 20


def quiet(engine: CacheEngine) -> bool:
    """Waits until nothing is under way any more."""
    chain = engine._chain
    handed_over = threading.Event()
    chain._behind(handed_over.set)
    assert handed_over.wait(PATIENCE_S)
    gc.collect(0)
    return engine.flush(PATIENCE_S) and eventually(
        lambda: (
            not chain._flights.num_waiting
            and not chain.pool.stats().leases
            and all(not tier.index.stats().reserved_bytes for tier in chain.tiers)
            and all(
                not tier._executor.stats().traffic.in_flight_bytes
                for tier in chain.tiers
                if isinstance(tier, StorageTier) and tier._executor is not None
            )
        ),
        timeout_s=PATIENCE_S,
    )


def books_agree(engine: CacheEngine, place: str) -> None:
    """Nothing is leased, reserved, waited for or claimed; each tier's index says what the tier has."""
    assert quiet(engine), place
    chain = engine._chain
    chain.pool.check()
    assert not chain._storing, place
    for tier in chain.tiers:
        index = tier.index
        stats = index.stats()
        keys = index.keys()
        entries = {key: entry for key in keys if (entry := index.get(key)) is not None}
        assert stats.used_bytes == sum(entry.stored for entry in entries.values()), place
        assert stats.capacity_bytes is None or stats.used_bytes <= stats.capacity_bytes, place
        for key, entry in entries.items():
            assert entry.place == "here", place
            assert entry.children == sum(other.parent == key for other in entries.values()), place
        if isinstance(tier, MemoryTier):
            assert not tier._storing, place
            assert tier.stats()[1].entries == chain.pool.stats().holds == len(entries), place
        else:
            assert tier.writes.depth() == tier.writes._active == tier.reads.queue._bytes == 0, place
            assert not tier.exact or tier._executor is None or sorted(entries) == held(tier), place


def held(tier: StorageTier) -> list[str]:
    assert tier._executor is not None
    return sorted(entry.key for entry in tier._executor.scan("", tier._clock() + PATIENCE_S))
