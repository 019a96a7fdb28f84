"""Staged copies, on a device that runs in the worst order that its events allow."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from cache_scenario import CONTENT, HEADS, LAYERS
from lazy_device import ENGINE, LazyDevice
from staged_kv import (
    BLOCK_SLOTS,
    NUM_SLOTS,
    ORDERS,
    expected,
    overwrite,
    random_layers,
    room_for,
    staged,
    views,
)

from lmcache_core.kernels import DeviceError, PagedLayers


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def device(request: pytest.FixtureRequest) -> LazyDevice:
    return LazyDevice(**request.param)


SLOTS = [37, 3, -1, 100, 101, 102, 103, 4, 5, 6, 7, 8, 9, 10, 11, 12, -1, -1, 64, 143]


@pytest.mark.parametrize("slots", [SLOTS, range(5, 33)], ids=["slots", "range"])
def test_a_gather_has_what_the_engine_queued_before_it_and_nothing_later(
    device: LazyDevice, slots: list[int] | range
) -> None:
    layers, source = random_layers(1), random_layers(2)
    overwrite(layers, 0x11)
    want = expected(source, list(slots), hole=0)
    _, mover = staged(device, layers)
    device.queue(lambda: [to.copy_(of) for to, of in zip(layers, source, strict=True)] and None)
    payload = room_for(len(slots))
    mover.move([(slots if isinstance(slots, range) else torch.tensor(slots), payload)], gathering=True)
    assert [bytes(segment) for segment in payload] == want
    device.queue(lambda: overwrite(layers, 0x22))
    device.finish()
    assert [bytes(segment) for segment in payload] == want


@pytest.mark.parametrize("slots", [SLOTS, range(5, 33)], ids=["slots", "range"])
def test_what_the_engine_queues_after_a_scatter_sees_it_and_the_payload_is_free(
    device: LazyDevice, slots: list[int] | range
) -> None:
    layers, source = random_layers(1), random_layers(2)
    kept = [layer.clone() for layer in layers]
    for to, of in zip(kept, source, strict=True):
        for slot in slots:
            if slot >= 0:
                to[slot // BLOCK_SLOTS, :, slot % BLOCK_SLOTS] = of[
                    slot // BLOCK_SLOTS, :, slot % BLOCK_SLOTS
                ]
    payload = views(expected(source, list(slots)))
    mapping_of = torch.tensor(list(slots), dtype=torch.int32)
    seen: list[list[torch.Tensor]] = []
    _, mover = staged(device, layers)
    mover.move([(slots if isinstance(slots, range) else mapping_of, payload)], gathering=False)
    for segment in payload:
        segment[:] = bytes(len(segment))
    mapping_of.zero_()
    device.queue(lambda: seen.append([layer.clone() for layer in layers]))
    device.finish()
    for got, want in zip(seen[0], kept, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def gathered_right(device: LazyDevice) -> bool:
    layers = random_layers(3, num_layers=6)
    _, mover = staged(device, layers, staging_tokens=32)
    payload = room_for(20, num_layers=6)
    mover.move([(torch.tensor(range(40, 60)), payload)], gathering=True)
    return [bytes(segment) for segment in payload] == expected(layers, list(range(40, 60)))


def scattered_right(device: LazyDevice) -> bool:
    layers, source = random_layers(3, num_layers=6), random_layers(4, num_layers=6)
    _, mover = staged(device, layers, staging_tokens=32)
    want = expected(source, list(range(40, 60)))
    mover.move([(torch.tensor(range(40, 60)), views(want))], gathering=False)
    got: list[bytes] = []
    device.queue(lambda: got.extend(expected(layers, list(range(40, 60)))))
    device.finish()
    return got == want


@pytest.mark.parametrize("right", [gathered_right, scattered_right])
@pytest.mark.parametrize("whose", ["engine", "ours"])
def test_each_event_that_a_stream_follows_is_needed(right: Callable[[LazyDevice], bool], whose: str) -> None:
    """A missing event shows: in one order or another the bytes are wrong."""
    outcomes = []
    for good in ORDERS.values():
        assert right(LazyDevice(**good))
        outcomes.append(right(LazyDevice(**good, ignored=lambda s: (s == ENGINE) == (whose == "engine"))))
    assert not all(outcomes)


def test_only_the_copies_that_matter_are_waited_for() -> None:
    device = LazyDevice()
    layers = random_layers(1)
    _, mover = staged(device, layers, staging_tokens=64)
    mover.move([(range(20), room_for(20))], gathering=True)
    assert device.waits == ["wait"]
    by_layer = PagedLayers(mover.staging, range(20))
    segments = room_for(20)
    for layer in range(LAYERS):
        by_layer.scatter_layer(layer, 0, 20, segments[layer])
    assert device.waits == ["wait"]


def test_slots_and_payloads_that_do_not_fit_are_refused_before_anything_is_queued() -> None:
    device = LazyDevice(engine_greedy=True, ours_greedy=True)
    layers = random_layers(1)
    before = [layer.clone() for layer in layers]
    _, mover = staged(device, layers)
    good = (range(4), room_for(4))
    with pytest.raises(ValueError, match=f"token 1 of frame 1: slot {NUM_SLOTS} is not among {NUM_SLOTS}"):
        mover.move([good, (torch.tensor([0, NUM_SLOTS]), room_for(2))], gathering=True)
    with pytest.raises(ValueError, match="token 1 of frame 1: slot 3 is named twice"):
        mover.move([good, (torch.tensor([9, 3]), room_for(2))], gathering=False)
    with pytest.raises(ValueError, match=r"payload segment 2 of frame 0 must be 512 .* not 511"):
        mover.move([(range(4), [*room_for(4)[:2], memoryview(bytearray(511))])], gathering=False)
    with pytest.raises(ValueError, match="read-only: True"):
        mover.move([(range(4), [memoryview(bytes(512))] * LAYERS)], gathering=True)
    assert device.live == (0, 0, 0)
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(layers, before, strict=True)
    )


@pytest.mark.parametrize("gathering", [True, False])
@pytest.mark.parametrize("method", ["launch", "copy", "record", "follow", "wait"])
def test_after_a_failure_that_direction_refuses_work_and_close_gives_all_back(
    method: str, gathering: bool
) -> None:
    device = LazyDevice(failing=method)
    staging, mover = staged(device, random_layers(1))
    frames = [(torch.tensor([3, 1]), room_for(2))]
    with pytest.raises(DeviceError, match=f"{method} failed on purpose"):
        mover.move(frames, gathering=gathering)
    device.failing = ""
    with pytest.raises(DeviceError, match=f"failed before.*{method}"):
        mover.move(frames, gathering=gathering)
    with pytest.raises(DeviceError, match="failed before"):
        staging.wait(gathering=gathering)
    mover.move(frames, gathering=not gathering)
    staging.close()
    assert device.live == (0, 0, 0)


@pytest.mark.parametrize("after", range(5))
def test_device_memory_that_is_not_to_be_had_leaks_nothing(after: int) -> None:
    device = LazyDevice(failing="new_event" if after else "allocate", fail_after=after - 1)
    _, mover = staged(device, random_layers(1))
    with pytest.raises(DeviceError):
        mover.move([(range(2), room_for(2))], gathering=True)
    assert device.live == (0, 0, 0)
    device.failing = ""
    mover.move([(range(2), room_for(2))], gathering=True)


def test_staging_that_is_dropped_waits_for_its_copies_first() -> None:
    device = LazyDevice()
    layers = random_layers(1)
    staging, mover = staged(device, layers)
    by_layer = PagedLayers(staging, range(20))
    segment = room_for(20)[0]
    by_layer.gather_layer(0, 0, 20, segment)
    assert not any(segment)
    del staging, mover, by_layer
    gc.collect()
    assert bytes(segment) == expected(layers, list(range(20)))[0]
    assert device.live == (0, 0, 0)


def test_staging_that_is_closed_waits_for_the_kernels_that_read_it(device: LazyDevice) -> None:
    layers, source = random_layers(1), random_layers(2)
    staging, _ = staged(device, layers)
    by_layer = PagedLayers(staging, range(20))
    want = expected(source, list(range(20)))
    for layer, segment in enumerate(views(want)):
        by_layer.scatter_layer(layer, 0, 20, segment)
    staging.close()
    assert device.live == (0, 0, 0)
    device.finish()
    assert expected(layers, list(range(20))) == want


def test_events_are_used_again_and_memory_is_let_go_as_copies_end() -> None:
    device = LazyDevice(engine_greedy=True, ours_greedy=True)
    staging, _ = staged(device, random_layers(1))
    layers = PagedLayers(staging, range(20))
    segment = room_for(20)[0]
    for _ in range(20):
        layers.scatter_layer(0, 0, 20, segment)
    assert device.live[1] <= 6


def test_payloads_that_overlap_each_other_are_refused_on_a_device_too() -> None:
    device = LazyDevice(engine_greedy=True, ours_greedy=True)
    _, mover = staged(device, random_layers(1))
    nbytes = HEADS * 20 * CONTENT
    memory = memoryview(bytearray(LAYERS * nbytes))
    segments = [memory[nbytes * layer : nbytes * (layer + 1)] for layer in range(LAYERS - 1)]
    shared = memory[nbytes - 1 : 2 * nbytes - 1]
    with pytest.raises(ValueError, match="of frame 0 overlaps another one"):
        mover.move([(range(20), [*segments, shared])], gathering=True)
    assert device.live == (0, 0, 0)
    mover.move([(range(20), [*segments, shared])], gathering=False)


def test_a_thread_that_works_on_another_device_queues_nothing() -> None:
    device = LazyDevice(failing="check_thread")
    staging, mover = staged(device, random_layers(1))
    with pytest.raises(DeviceError, match="check_thread failed on purpose"):
        mover.move([(range(4), room_for(4))], gathering=True)
    with pytest.raises(DeviceError, match="check_thread failed on purpose"):
        PagedLayers(staging, range(4)).scatter_layer(0, 0, 4, room_for(4)[0])
    assert device.live == (0, 0, 0)
