"""Loads and stores layer by layer: overlap, early ends, ranges of two copies, and what is given back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cache_scenario import (
    CHUNK,
    LAYERS,
    LayeredKV,
    Recorder,
    config_of,
    cpu,
    disk,
    engine_of,
    eventually,
    prompt,
    retrieve,
    settle,
    store,
)
from faulty_backends import Controls, faulty

from lmcache_core.engine import CacheEngine, LoadedLayer
from lmcache_core.engine.loading import MISFIT
from lmcache_core.events import FrameRejected, LayerLoaded, Retrieved, Stored
from lmcache_core.frame import PAGE_NBYTES, FrameHeader, Segment, parse_header, seal
from lmcache_core.sdk import Capabilities, StorageKey

PATIENCE_S = 20.0
LAST_OFFSET = LAYERS * PAGE_NBYTES  # where the last layer starts: a page each, one for the header
RANGED = Capabilities(
    medium="network", delete=True, scan=True, persistent=True, ranged=True, max_in_flight=4, max_batch=1
)
WHOLE = replace(RANGED, ranged=False)
TOKENS = prompt(3, 3 * CHUNK + 24)
STORED = 3 * CHUNK + 16


def remote(**settings: object) -> dict[str, object]:
    return {"name": "far", "backend": "faulty", "capacity": "1MiB", "deadline": PATIENCE_S, **settings}


def build(controls: Controls, *tiers: dict[str, object], recorder: Recorder | None = None) -> CacheEngine:
    return engine_of(config_of(*tiers), registry=faulty(controls), recorder=recorder)


def load(engine: CacheEngine, tokens: Sequence[int] = TOKENS) -> list[int]:
    """All layers, each byte proved against the oracle; the number of good tokens of each."""
    kv = LayeredKV(tokens)
    counts = []
    for layer, loaded in enumerate(engine.retrieve_layers(tokens, kv)):
        assert loaded == LoadedLayer(layer=layer, num_tokens=loaded.num_tokens)
        assert kv.good(layer, loaded.num_tokens)
        counts.append(loaded.num_tokens)
    return counts


@pytest.mark.parametrize("capabilities", [RANGED, WHOLE], ids=["ranged", "whole"])
@pytest.mark.parametrize("near", [True, False], ids=["some in memory", "all far"])
def test_every_layer_of_every_chunk_arrives_whatever_tier_it_is_in(
    capabilities: Capabilities, near: bool
) -> None:
    controls, recorder = Controls(), Recorder()
    controls.capabilities = capabilities
    with build(controls, cpu(), remote(promote="never"), recorder=recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        engine.clear(search_range=["cpu"])
        if near:
            store(engine, TOKENS[: 2 * CHUNK])
            engine.prefetch(TOKENS, limit=2 * CHUNK).wait(PATIENCE_S)
        assert load(engine) == [STORED] * LAYERS
        assert recorder.of(Retrieved)[-1].num_tokens == STORED
        assert dict(recorder.of(Retrieved)[-1].tokens_by_tier) == (
            {"cpu": 2 * CHUNK, "far": CHUNK + 16} if near else {"far": STORED}
        )
        assert [event.layer for event in recorder.of(LayerLoaded)] == list(range(LAYERS))
        settle(engine)


def test_layers_come_from_the_disk_tier_by_ranges(tmp_path: Path) -> None:
    recorder = Recorder()
    with engine_of(config_of(disk(tmp_path)), recorder=recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        assert load(engine) == [STORED] * LAYERS
        assert all(event.nbytes > 0 for event in recorder.of(LayerLoaded))
        settle(engine)


@pytest.mark.parametrize(("least", "by_ranges"), [(PAGE_NBYTES, True), (PAGE_NBYTES + 1, False)])
def test_frames_whose_layers_are_shorter_than_a_range_is_worth_come_whole(
    least: int, by_ranges: bool
) -> None:
    controls, recorder = Controls(), Recorder()
    controls.capabilities = replace(RANGED, range_min=least)
    with build(controls, remote(), recorder=recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        assert load(engine) == [STORED] * LAYERS
        assert {event.nbytes > 0 for event in recorder.of(LayerLoaded)} == {by_ranges}
        settle(engine)


def test_a_mask_and_a_limit_bound_what_is_loaded() -> None:
    controls = Controls()
    controls.capabilities = RANGED
    with build(controls, remote()) as engine:
        store(engine, TOKENS)
        settle(engine)
        kv = LayeredKV(TOKENS)
        mask = [i >= CHUNK for i in range(len(TOKENS))]
        loaded = list(engine.retrieve_layers(TOKENS, kv, mask=mask, limit=2 * CHUNK))
        assert [each.num_tokens for each in loaded] == [CHUNK] * LAYERS
        assert kv.layers == [(layer, CHUNK, CHUNK) for layer in range(LAYERS)]
        with pytest.raises(ValueError, match="no multiple"):
            engine.retrieve_layers(TOKENS, kv, mask=[i >= 3 for i in range(len(TOKENS))])
        settle(engine)


def test_without_a_hit_every_layer_is_yielded_with_nothing() -> None:
    with build(Controls(), remote()) as engine:
        assert load(engine) == [0] * LAYERS


def test_the_first_layer_can_be_used_before_the_last_has_arrived() -> None:
    controls, gate = Controls(), threading.Event()
    controls.capabilities = RANGED
    with build(controls, remote()) as engine:
        store(engine, TOKENS)
        settle(engine)
        asked: list[int] = []

        def hold_the_last(key: StorageKey, offset: int) -> None:
            asked.append(offset)
            if offset == LAST_OFFSET:
                assert gate.wait(PATIENCE_S)

        controls.before_read = hold_the_last
        kv = LayeredKV(TOKENS)
        layers = engine.retrieve_layers(TOKENS, kv)
        assert next(layers).num_tokens == STORED
        assert eventually(lambda: LAST_OFFSET in asked), "the window's layers come while the first is used"
        assert next(layers).num_tokens == STORED
        assert not gate.is_set()
        gate.set()
        assert next(layers).num_tokens == STORED
        assert next(layers, None) is None
        settle(engine)


def test_no_more_than_two_layers_are_asked_for_ahead() -> None:
    controls = Controls()
    controls.capabilities = RANGED
    with build(controls, remote()) as engine:
        store(engine, TOKENS[:CHUNK])
        settle(engine)
        asked: list[int] = []
        controls.before_read = lambda key, offset: asked.append(offset)
        layers = engine.retrieve_layers(TOKENS[:CHUNK], LayeredKV(TOKENS))
        assert not asked
        next(layers)
        assert eventually(lambda: len(asked) == 3)  # the first, and two behind it
        assert engine._chain.pool.stats().leases <= 2
        layers.close()
        settle(engine)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("how", ["fails", "is damaged", "is gone"])
def test_a_chunk_that_ends_at_some_layer_ends_the_prefix_there(layer: int, how: str) -> None:
    controls, recorder = Controls(), Recorder()
    controls.capabilities = RANGED
    with build(controls, remote(), recorder=recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        second = engine.content(TOKENS).keys(engine.part)[1]
        offset = (layer + 1) * PAGE_NBYTES if layer else 0
        value, parent = controls.values[second]

        def spoil(key: StorageKey, at: int) -> None:
            if key == second and at == offset:
                if how == "fails":
                    raise OSError("told to fail")
                if how == "is gone":
                    del controls.values[key]
                    return
                damaged = bytearray(value)
                damaged[(layer + 1) * PAGE_NBYTES + 7] ^= 1
                controls.values[key] = (bytes(damaged), parent)

        controls.before_read = spoil
        assert load(engine) == [STORED] * layer + [CHUNK] * (LAYERS - layer)
        assert recorder.of(Retrieved)[-1].num_tokens == CHUNK
        controls.before_read = lambda key, at: None
        rejected = [event.key for event in recorder.of(FrameRejected)]
        assert (second in rejected) == (how == "is damaged")
        settle(engine)
        store(engine, TOKENS)  # what was bad is written anew
        settle(engine)
        if how != "fails":
            assert load(engine) == [STORED] * LAYERS


def test_a_segment_that_can_not_be_checked_ends_the_prefix_and_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process ran out of memory or files while it checked: nothing is known of the copy, so it stays."""
    controls, recorder = Controls(), Recorder()
    controls.capabilities = RANGED
    with build(controls, remote(), recorder=recorder) as engine:
        store(engine, TOKENS)
        settle(engine)

        def out_of_memory(memory: memoryview, header: FrameHeader, index: int) -> None:
            if index == 1:
                raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("lmcache_core.tiers.layers.verify_segment", out_of_memory)
            assert load(engine) == [STORED] + [0] * (LAYERS - 1)
        settle(engine)
        assert recorder.of(FrameRejected) == []
        assert load(engine) == [STORED] * LAYERS


@pytest.mark.parametrize("come", ["by layers", "whole", "from memory", "whole, and are read whole"])
@pytest.mark.parametrize(
    "lie",
    [
        {"first_token": 0},
        {"num_tokens": CHUNK - 16},
        {"content_format": "test 63"},
        {"codecs": ("zstd",)},
        {"segments": (Segment(2048, 2048),) * LAYERS},
        {"segments": (Segment(PAGE_NBYTES, PAGE_NBYTES),) * (LAYERS - 1)},
    ],
    ids=["first token", "tokens", "content format", "codecs", "segments' length", "segments"],
)
def test_a_frame_that_is_whole_and_not_the_one_meant_ends_the_prefix(
    lie: Mapping[str, object], come: str
) -> None:
    """Its checksums, key and part are right; what the header says of the KV is not what the engine reads."""
    controls, recorder = Controls(), Recorder()
    controls.capabilities = RANGED if come == "by layers" else WHOLE
    tiers = [cpu()] * (come == "from memory") + [remote(promote="never")]
    with build(controls, *tiers, recorder=recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        engine.clear(search_range=engine.memory_tiers)
        second = engine.content(TOKENS).keys(engine.part)[1]
        value, parent = controls.values[second]
        header = replace(parse_header(memoryview(value)), **lie)
        other = bytearray(value)[: header.frame_nbytes]
        seal(memoryview(other), header)
        controls.values[second] = (bytes(other), parent)
        if come == "from memory":
            assert engine.prefetch(TOKENS).wait(PATIENCE_S) == STORED
        for _ in range(2):  # what was in memory is gone by the second, and found again farther away
            if come == "whole, and are read whole":
                assert retrieve(engine, TOKENS) == CHUNK
            else:
                assert load(engine) == [CHUNK] * LAYERS
            settle(engine)
        assert [(event.key, event.reason) for event in recorder.of(FrameRejected)] == [(second, MISFIT)]


def test_two_copies_seen_by_two_ranges_are_no_hit_and_the_newer_one_stays() -> None:
    controls, recorder = Controls(), Recorder()
    controls.capabilities = RANGED
    with build(controls, remote(), recorder=recorder) as engine:
        store(engine, TOKENS[:CHUNK])
        settle(engine)
        (key,) = engine.content(TOKENS[:CHUNK]).keys(engine.part)
        value, parent = controls.values[key]
        controls.copies[key] = 1
        other = bytes(value[: 2 * PAGE_NBYTES]) + bytes(len(value) - 2 * PAGE_NBYTES)

        def replace_it(asked: StorageKey, offset: int) -> None:
            if offset == LAST_OFFSET:
                controls.values[key] = (other, parent)
                controls.copies[key] += 1

        controls.before_read = replace_it
        assert load(engine, TOKENS[:CHUNK]) == [CHUNK] * (LAYERS - 1) + [0]
        assert not recorder.of(FrameRejected)
        assert key in controls.values
        settle(engine)


@pytest.mark.parametrize("after", range(LAYERS + 1))
@pytest.mark.parametrize("capabilities", [RANGED, WHOLE], ids=["ranged", "whole"])
def test_closing_early_gives_everything_back(after: int, capabilities: Capabilities) -> None:
    controls = Controls()
    controls.capabilities = capabilities
    with build(controls, cpu(), remote()) as engine:
        store(engine, TOKENS)
        settle(engine)
        engine.clear(search_range=["cpu"])
        layers = engine.retrieve_layers(TOKENS, LayeredKV(TOKENS))
        for _ in range(after):
            next(layers)
        layers.close()
        settle(engine)
        assert retrieve(engine, TOKENS) == STORED
        settle(engine)


def test_memory_of_a_read_that_hangs_is_set_aside_until_the_store_lets_go() -> None:
    controls = Controls()
    controls.capabilities = RANGED
    with build(controls, remote(deadline=1)) as engine:
        store(engine, TOKENS)
        settle(engine)
        inside = controls.hang("get")
        layers = engine.retrieve_layers(TOKENS, LayeredKV(TOKENS))
        assert next(layers).num_tokens == 0
        assert inside.wait(PATIENCE_S)
        layers.close()
        assert engine._chain.pool.stats().leases > 0
        controls.let_go("get")
        settle(engine)
        engine._chain.tiers[0].retry_now()  # type: ignore[union-attr]


def test_a_target_that_raises_ends_the_load_and_leaves_nothing_behind() -> None:
    class Broken(LayeredKV):
        def scatter_layer(self, layer: int, first: int, count: int, segment: memoryview) -> None:
            if (layer, first) == (1, CHUNK):
                raise ZeroDivisionError

    controls = Controls()
    controls.capabilities = RANGED
    with build(controls, cpu(), remote()) as engine:
        store(engine, TOKENS)
        settle(engine)
        for search_range in (["far"], None):
            layers = engine.retrieve_layers(TOKENS, Broken(TOKENS), search_range=search_range)
            next(layers)
            with pytest.raises(ZeroDivisionError):
                next(layers)
            settle(engine)


def test_frames_stored_by_layers_are_found_once_the_last_layer_is_in() -> None:
    recorder = Recorder()
    with build(Controls(), cpu(), remote(), recorder=recorder) as engine:
        layers = engine.store_layers(TOKENS, LayeredKV(TOKENS))
        for layer in range(LAYERS):
            assert engine.lookup(TOKENS).num_tokens == 0
            assert next(layers) == layer
        assert engine.lookup(TOKENS).num_tokens == STORED
        with pytest.raises(StopIteration) as ended:
            next(layers)
        assert ended.value.value.num_tokens == STORED
        assert recorder.of(Stored)[-1].num_tokens == STORED
        settle(engine)
        assert retrieve(engine, TOKENS) == STORED
        assert load(engine) == [STORED] * LAYERS
        settle(engine)


@pytest.mark.parametrize("after", range(LAYERS))
def test_a_store_by_layers_that_is_closed_early_leaves_nothing(after: int) -> None:
    with build(Controls(), cpu(), remote()) as engine:
        layers = engine.store_layers(TOKENS, LayeredKV(TOKENS))
        for _ in range(after):
            next(layers)
        layers.close()
        assert engine.lookup(TOKENS).num_tokens == 0
        settle(engine)


def test_a_store_by_layers_takes_what_memory_there_is_and_says_what_it_skipped() -> None:
    config = config_of(remote(), memory={"staging": "96KiB", "huge_pages": False}, allocate_deadline="10ms")
    with engine_of(config, registry=faulty(Controls())) as engine:
        tokens = prompt(8, 8 * CHUNK)
        layers = engine.store_layers(tokens, LayeredKV(tokens))
        for _ in range(LAYERS):
            next(layers)
        with pytest.raises(StopIteration) as ended:
            next(layers)
        result = ended.value.value
        assert 0 < result.num_tokens < len(tokens)
        assert result.num_tokens + result.num_skipped_tokens == len(tokens)
        settle(engine)
        assert retrieve(engine, tokens) == result.num_tokens


def test_known_chunks_are_not_gathered_again_layer_by_layer() -> None:
    with build(Controls(), cpu()) as engine:
        store(engine, TOKENS[: 2 * CHUNK])

        class Counting(LayeredKV):
            def gather_layer(self, layer: int, first: int, count: int, segment: memoryview) -> None:
                super().gather_layer(layer, first, count, segment)
                self.gathered.append((first, count))

        kv = Counting(TOKENS)
        assert list(engine.store_layers(TOKENS, kv)) == list(range(LAYERS))
        assert set(kv.gathered) == {(2 * CHUNK, CHUNK), (3 * CHUNK, 16)}
        assert retrieve(engine, TOKENS) == STORED
        settle(engine)
