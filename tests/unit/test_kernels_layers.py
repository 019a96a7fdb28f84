"""Layers of a request through staged copies, and on the host: with an engine, ended early, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_scenario import CHUNK, CONTENT, HEADS, LAYERS, config_of, cpu, engine_of, prompt
from lazy_device import ENGINE, LazyDevice
from staged_kv import (
    NUM_SLOTS,
    ORDERS,
    expected,
    overwrite,
    random_layers,
    room_for,
    staged,
)

from lmcache_core.kernels import DeviceError, PagedKV, PagedLayers, paged
from lmcache_core.memory import MemoryPool


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def device(request: pytest.FixtureRequest) -> LazyDevice:
    return LazyDevice(**request.param)


def test_an_engine_stores_and_loads_layer_by_layer_through_staging(device: LazyDevice) -> None:
    tokens = prompt(1, 3 * CHUNK)
    source, target = random_layers(5), random_layers(6)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[: 3 * CHUNK]
    with engine_of(config_of(cpu())) as engine:
        storing, _ = staged(device, source, staging_tokens=20)
        for _ in engine.store_layers(tokens, PagedLayers(storing, slots)):
            pass
        overwrite(source, 0x33)  # committed frames are whole
        loading, _ = staged(device, target, staging_tokens=20)
        computed: list[bytes] = []
        layers = PagedLayers(loading, slots, stream=ENGINE)
        for loaded in engine.retrieve_layers(tokens, layers):
            assert loaded.num_tokens == 3 * CHUNK
            layer = target[loaded.layer : loaded.layer + 1]
            device.queue(lambda layer=layer: computed.extend(expected(layer, slots.tolist())))
        device.finish()
        assert computed == expected(random_layers(5), slots.tolist())
        loading.wait(gathering=False)
        assert engine.stats().memory.leases == 0


def test_frames_of_fewer_layers_than_the_kv_has_are_whole_when_they_are_found() -> None:
    """A model part, as of a pipeline: the engine's last layer is not the last one of the KV."""
    tokens, device, source = (
        prompt(1, 2 * CHUNK),
        LazyDevice(engine_greedy=True),
        random_layers(5, LAYERS + 1),
    )
    staging, _ = staged(device, source)
    found: list[bytes] = []

    class Target:
        def scatter(self, first: int, num_tokens: int, payload: list[memoryview]) -> None:
            found.extend(bytes(segment) for segment in payload)

    with engine_of(config_of(cpu())) as engine:
        for _ in engine.store_layers(tokens, PagedLayers(staging, range(2 * CHUNK))):
            pass
        engine.retrieve(tokens, Target())
    chunks = [expected(source[:LAYERS], list(range(at, at + CHUNK))) for at in (0, CHUNK)]
    assert found == chunks[0] + chunks[1]


def test_an_engine_stores_and_loads_layer_by_layer_on_the_host() -> None:
    tokens, slots = prompt(1, 3 * CHUNK), torch.randperm(NUM_SLOTS)[: 3 * CHUNK]
    source, target = random_layers(5), random_layers(6)
    with engine_of(config_of(cpu())) as engine:
        for _ in engine.store_layers(tokens, PagedKV.from_blocks(source, axes="nhse").by_layer(slots)):
            pass
        loads = PagedKV.from_blocks(target, axes="nhse").by_layer(slots)
        assert [x.num_tokens for x in engine.retrieve_layers(tokens, loads)] == [3 * CHUNK] * LAYERS
    assert expected(target, slots.tolist()) == expected(source, slots.tolist())


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_token_without_a_slot_is_left_out_of_loads_and_never_stored(where: str) -> None:
    """What the frame's memory held before would be found as its KV."""
    tokens, slots = prompt(1, 2 * CHUNK), torch.arange(2 * CHUNK)
    device, source, target = LazyDevice(), random_layers(5), random_layers(6)

    def by_layer(layers: list[torch.Tensor], slots: torch.Tensor) -> PagedLayers:
        if where == "host":
            return PagedKV.from_blocks(layers, axes="nhse").by_layer(slots)
        return PagedLayers(staged(device, layers)[0], slots)

    holed = slots.clone()
    holed[CHUNK + 3] = -1
    with engine_of(config_of(cpu())) as engine:
        with pytest.raises(ValueError, match=f"token {CHUNK + 3} is in a hole"):
            list(engine.store_layers(tokens, by_layer(source, holed)))
        assert engine.lookup(tokens).num_tokens == 0
        assert engine.stats().memory.leases == 0
        list(engine.store_layers(tokens, by_layer(source, slots)))
        list(engine.store_layers(prompt(2, CHUNK), by_layer(source, holed)))  # none in what is stored
        loads = by_layer(target, holed)
        assert [x.num_tokens for x in engine.retrieve_layers(tokens, loads)] == [2 * CHUNK] * LAYERS
        device.finish()
    kept = expected(random_layers(6), [CHUNK + 3])
    assert expected(target, [CHUNK + 3]) == kept
    assert expected(target, [CHUNK + 2, CHUNK + 4]) == expected(source, [CHUNK + 2, CHUNK + 4])


def test_a_frame_given_up_early_is_not_used_again_while_a_copy_is_on_its_way(device: LazyDevice) -> None:
    pool = MemoryPool(1 << 20, huge_pages=False)
    staging, _ = staged(device, random_layers(1))
    layers = PagedLayers(staging, range(20))
    lease = pool.try_allocate(HEADS * 20 * CONTENT, owner="test")
    assert lease is not None
    segment = lease.memory[:]
    layers.gather_layer(0, 0, 20, segment)
    segment.release()
    lease.release()
    pool.check()
    assert pool.stats().used_bytes > 0
    staging.wait(gathering=True)
    pool.check()
    assert pool.stats().used_bytes == 0


@pytest.mark.parametrize("first", ["a load", "a store given up"])
def test_the_next_request_has_the_memory_of_frames_whose_copies_have_ended(
    device: LazyDevice, first: str
) -> None:
    """Else a pool that one request filled stays full: nothing more is stored, so nothing is loaded."""
    tokens, other = prompt(1, 3 * CHUNK), prompt(2, 3 * CHUNK)
    staging, _ = staged(device, random_layers(5))
    config = config_of(
        cpu(capacity="64KiB"),
        memory={"staging": "32KiB", "huge_pages": False},
        allocate_deadline="1ms",
    )
    with engine_of(config) as engine:
        if first == "a load":
            list(engine.store_layers(tokens, PagedLayers(staging, range(3 * CHUNK))))
            list(engine.retrieve_layers(tokens, PagedLayers(staging, range(3 * CHUNK))))
        else:
            storing = engine.store_layers(tokens, PagedLayers(staging, range(3 * CHUNK)))
            next(storing)
            storing.close()
        assert engine.stats().memory.quarantined_bytes > 0
        device.finish()
        layers = PagedLayers(staging, range(3 * CHUNK))
        assert engine.stats().memory.quarantined_bytes == 0
        list(engine.store_layers(other, layers))
        assert engine.lookup(other).num_tokens == 3 * CHUNK


def test_after_a_failure_the_next_request_does_not_take_copies_for_ended() -> None:
    """An event that could not be recorded says nothing of the copy before it."""
    device = LazyDevice(failing="record", fail_after=2)
    staging, _ = staged(device, random_layers(1))
    pool = MemoryPool(1 << 20, huge_pages=False)
    lease = pool.try_allocate(HEADS * 8 * CONTENT, owner="test")
    assert lease is not None
    with pytest.raises(DeviceError):
        PagedLayers(staging, range(8)).gather_layer(0, 0, 8, lease.memory[:])
    lease.release()
    PagedLayers(staging, range(8))
    assert pool.stats().used_bytes > 0
    staging.close()
    assert pool.stats().used_bytes == 0


def test_a_store_that_ends_early_gives_the_frames_back_once_its_copies_end(device: LazyDevice) -> None:
    tokens = prompt(1, 3 * CHUNK)
    staging, _ = staged(device, random_layers(5))
    with engine_of(config_of(cpu())) as engine:
        storing = engine.store_layers(tokens, PagedLayers(staging, range(3 * CHUNK)))
        next(storing)
        storing.close()
        staging.wait(gathering=True)
        stats = engine.stats().memory
        assert (stats.leases, stats.quarantined_bytes) == (0, 0)
        assert engine.lookup(tokens).num_tokens == 0


def test_layers_outside_the_slots_are_refused() -> None:
    staging, _ = staged(LazyDevice(), random_layers(1))
    layers = PagedLayers(staging, range(20))
    with pytest.raises(ValueError, match="4 tokens from 18 on, of 20 slots"):
        layers.gather_layer(0, 18, 4, room_for(4)[0])
    with pytest.raises(ValueError, match="4 tokens from -20 on, of 20 slots"):
        layers.scatter_layer(0, -20, 4, room_for(4)[0])
    with pytest.raises(ValueError, match="0 tokens from 3 on, of 20 slots"):
        layers.gather_layer(0, 3, 0, memoryview(bytearray()))
    with pytest.raises(ValueError, match=r"payload segment 1 of frame 0 must be .* not 9"):
        layers.gather_layer(1, 0, 4, memoryview(bytearray(9)))
    for move in (layers.gather_layer, layers.scatter_layer):
        for layer in (LAYERS, -1, 10**6):
            with pytest.raises(ValueError, match=f"layer {layer} of {LAYERS}"):
                move(layer, 0, 4, room_for(4)[0])
    with pytest.raises(ValueError, match="slot 3 is named twice"):
        PagedLayers(staging, torch.tensor([3, 3]))


def test_layers_are_moved_on_the_stream_that_was_given() -> None:
    device, source = LazyDevice(), random_layers(1)
    staging, _ = staged(device, source)
    theirs = device.new_stream()
    device.queue(lambda: overwrite(source, 0x44), theirs)
    layers, payload = PagedLayers(staging, range(20), stream=theirs), room_for(20)
    layers.gather_layer(0, 0, 20, payload[0])
    layers.wait_gathered()
    assert set(payload[0]) == {0x44}
    layers.scatter_layer(1, 0, 20, memoryview(bytearray(len(payload[0]))))
    found: list[bytes] = []
    device.queue(lambda: found.extend(expected(source[1:2], list(range(20)))), theirs)
    device.finish()
    assert found == [bytes(len(payload[0]))]


def test_layers_and_streams_are_integers_and_what_is_not_ends_no_direction() -> None:
    device, source = LazyDevice(), random_layers(1)
    staging, _ = staged(device, source)
    layers, payload = PagedLayers(staging, range(20)), room_for(20)
    with pytest.raises(TypeError):
        PagedLayers(staging, range(20), stream=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        layers.gather_layer(1.0, 0, 20, payload[1])  # type: ignore[arg-type]
    layers.gather_layer(np.int64(1), 0, 20, payload[1])  # type: ignore[arg-type]
    layers.wait_gathered()
    assert bytes(payload[1]) == expected(source, list(range(20)))[1]


def test_paged_kv_on_a_device_moves_frames_and_single_layers_through_one_staging(
    device: LazyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "device_of", lambda layout: device)
    layers = random_layers(1)
    kv = PagedKV.from_blocks(layers, axes="nhse")
    payload, one = room_for(20), room_for(20)[:1]
    kv.gather(range(20), payload)
    kv.layer(1).layer(0).gather(range(20), one)
    want = expected(layers, list(range(20)))
    assert [bytes(segment) for segment in payload] == want
    assert bytes(one[0]) == want[1]
    by_layer = kv.by_layer(range(20))
    by_layer.gather_layer(2, 0, 20, one[0])
    by_layer.wait_gathered()
    assert bytes(one[0]) == want[2]
    assert device.live[0] == 1


def test_two_layers_are_on_the_device_while_their_copies_are_late_and_the_third_waits() -> None:
    device = LazyDevice(engine_greedy=True)
    staging, _ = staged(device, random_layers(1), staging_tokens=64)
    layers = PagedLayers(staging, range(20))
    segments = room_for(20)
    for layer in (0, 1, 0):
        layers.gather_layer(layer, 0, 20, segments[layer])
    assert device.num_kernels_run == 2
    staging.wait(gathering=True)
    assert device.num_kernels_run == 3
