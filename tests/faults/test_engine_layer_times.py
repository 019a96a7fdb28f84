"""What a load by layers says of its times, and whose time it counts."""

from __future__ import annotations

import threading
import time

import pytest
from cache_scenario import (
    CHUNK,
    LAYERS,
    LayeredKV,
    Recorder,
    config_of,
    engine_of,
    eventually,
    prompt,
    settle,
    store,
)
from faulty_backends import Controls, faulty

from lmcache_core.engine import CacheEngine
from lmcache_core.engine.layerwise import GRACE_S
from lmcache_core.events import LayerLoaded
from lmcache_core.frame import PAGE_NBYTES
from lmcache_core.memory import Lease
from lmcache_core.sdk import Capabilities, StorageKey
from lmcache_core.tiers.layers import LayeredFrame

PATIENCE_S = 20.0
LAST_OFFSET = LAYERS * PAGE_NBYTES  # where the last layer starts: a page each, one for the header
RANGED = Capabilities(medium="network", delete=True, scan=True, persistent=True, ranged=True)
WHOLE = Capabilities(medium="network", delete=True, scan=True, persistent=True)
TOKENS = prompt(3, CHUNK)


def build(controls: Controls, recorder: Recorder | None = None) -> CacheEngine:
    far = {"name": "far", "backend": "faulty", "capacity": "1MiB", "deadline": PATIENCE_S}
    return engine_of(config_of(far), registry=faulty(controls), recorder=recorder)


def load(engine: CacheEngine) -> list[int]:
    return [layer.num_tokens for layer in engine.retrieve_layers(TOKENS, LayeredKV(TOKENS))]


def test_the_time_in_which_the_engine_computes_a_layer_is_not_the_tiers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controls, now, waits = Controls(), [time.monotonic()], []
    controls.capabilities = RANGED
    take = LayeredFrame.take

    def noted(self: LayeredFrame, layer: int, timeout_s: float) -> Lease | None:
        waits.append(timeout_s)
        return take(self, layer, timeout_s)

    monkeypatch.setattr(LayeredFrame, "take", noted)
    with build(controls) as engine:
        store(engine, TOKENS)
        settle(engine)
        engine._chain._clock = lambda: now[0]
        for _ in engine.retrieve_layers(TOKENS, LayeredKV(TOKENS)):
            now[0] += 3600
        assert waits == pytest.approx([PATIENCE_S + GRACE_S] * LAYERS)
        settle(engine)


def test_a_layer_has_arrived_when_it_came_and_not_when_the_next_one_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controls, recorder, gate, came = Controls(), Recorder(), threading.Event(), []
    controls.capabilities = RANGED
    take = LayeredFrame.take

    def hold_the_last(key: StorageKey, offset: int) -> None:
        assert offset != LAST_OFFSET or gate.wait(PATIENCE_S)

    def late(self: LayeredFrame, layer: int, timeout_s: float) -> Lease | None:
        if layer == LAYERS - 2:
            assert eventually(lambda: self._tickets[layer].settled)
            came.append(time.monotonic())
            gate.set()
            assert eventually(lambda: self._tickets[layer + 1].settled)
        return take(self, layer, timeout_s)

    monkeypatch.setattr(LayeredFrame, "take", late)
    with build(controls, recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        controls.before_read = hold_the_last
        assert load(engine) == [CHUNK] * LAYERS
        *_, before, last = recorder.of(LayerLoaded)
        assert before.arrived_at <= came[0] < last.arrived_at
        settle(engine)


def test_layers_of_whole_frames_have_arrived_when_those_have() -> None:
    controls, recorder, came = Controls(), Recorder(), []
    controls.capabilities = WHOLE
    controls.before_read = lambda key, offset: came.append(time.monotonic())
    with build(controls, recorder) as engine:
        store(engine, TOKENS)
        settle(engine)
        assert load(engine) == [CHUNK] * LAYERS
        first, *_ = recorder.of(LayerLoaded)
        assert first.requested_at <= came[-1] <= first.arrived_at <= first.scattered_at
        settle(engine)
