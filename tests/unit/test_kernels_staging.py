"""Staged copies, on a device that runs in the worst order that its events allow; CUDA calls; pinning."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cache_scenario import CHUNK, CONTENT, HEADS, LAYERS, config_of, cpu, engine_of, prompt
from lazy_device import ENGINE, LazyDevice

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import DeviceError, PagedKV, PagedLayers, paged, pin
from lmcache_core.kernels import device as device_module
from lmcache_core.kernels.device import CudaDevice
from lmcache_core.kernels.layout import blocks_layout
from lmcache_core.kernels.staging import StagedMover, Staging
from lmcache_core.memory import MemoryPool, mapping

BLOCKS, BLOCK_SLOTS = 9, 16
NUM_SLOTS = BLOCKS * BLOCK_SLOTS
ORDERS = {
    "all as late as can be": (False, False),
    "engine early, copies late": (True, False),
    "engine late, copies early": (False, True),
    "all at once": (True, True),
}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def device(request: pytest.FixtureRequest) -> LazyDevice:
    engine_greedy, ours_greedy = request.param
    return LazyDevice(engine_greedy=engine_greedy, ours_greedy=ours_greedy)


def random_layers(seed: int, num_layers: int = LAYERS) -> list[torch.Tensor]:
    """`[blocks, heads, slots, 2 dim]` with CONTENT bytes a token and head."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, BLOCK_SLOTS, CONTENT // 2)
    return [
        torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        for _ in range(num_layers)
    ]


def expected(layers: list[torch.Tensor], slots: list[int], hole: int = 0) -> list[bytes]:
    """The payload, element by element of the declaration."""
    payload = []
    for layer in layers:
        raw = layer.view(torch.uint8)
        rows = [
            raw[slot // BLOCK_SLOTS, head, slot % BLOCK_SLOTS].numpy().tobytes()
            if slot >= 0
            else bytes([hole]) * CONTENT
            for head in range(HEADS)
            for slot in slots
        ]
        payload.append(b"".join(rows))
    return payload


def room_for(num_tokens: int, num_layers: int = LAYERS) -> list[memoryview]:
    return [memoryview(bytearray(HEADS * num_tokens * CONTENT)) for _ in range(num_layers)]


def views(payload: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(segment)) for segment in payload]


def staged(
    device: LazyDevice, layers: list[torch.Tensor], *, staging_tokens: int = 8
) -> tuple[Staging, StagedMover]:
    staging = Staging(device, blocks_layout(layers, "nhse"), staging_tokens=staging_tokens)
    return staging, StagedMover(staging, range(len(layers)))


def overwrite(layers: list[torch.Tensor], value: int) -> None:
    for layer in layers:
        layer.view(torch.uint8).fill_(value)


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
    for engine_greedy, ours_greedy in ORDERS.values():
        good = {"engine_greedy": engine_greedy, "ours_greedy": ours_greedy}
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


def test_kv_on_a_device_is_not_narrowed() -> None:
    layers = [torch.empty(4, 2, 16, 64, dtype=torch.bfloat16, device="meta")]
    with pytest.raises(UnsupportedModel, match="the KV is on meta; only KV on the host can be narrowed"):
        PagedKV.from_blocks(layers, axes="nhse", narrow=True)


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


# -- PagedKV ---------------------------------------------------------------------------------------


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


def test_kv_where_no_device_can_move_it_is_refused_and_says_what_is_missing() -> None:
    layers = [torch.empty(4, 2, 16, 64, dtype=torch.bfloat16, device="meta")]
    with pytest.raises(UnsupportedModel, match="the KV is on meta: that needs CUDA"):
        PagedKV.from_blocks(layers, axes="nhse")
    with pytest.raises(UnsupportedModel, match="tensor 1 is on cpu, the first on meta"):
        PagedKV.from_blocks([*layers, torch.empty(4, 2, 16, 64, dtype=torch.bfloat16)], axes="nhse")


# -- CUDA calls and pinning ------------------------------------------------------------------------


class FakeCuda:
    """The device library, which refuses everything with one error."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def lmck_device_error(self, error: int) -> bytes:
        return b"out of luck"

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            return self.error

        return call


def test_a_cuda_call_that_fails_is_an_error_with_its_numbers() -> None:
    device = CudaDevice(FakeCuda(700), 3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"event_record\(5, 6\) on cuda:3: CUDA error 700, out of luck"):
        device.record(5, 6)
    device = CudaDevice(FakeCuda(0), 3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="the KV is on cuda:3, the calling thread works on cuda:0"):
        device.check_thread()


def test_a_launch_that_fails_is_an_error_with_its_numbers() -> None:
    from lmcache_core_kernels import abi

    layout, frame = abi.Layout(None, 1, 1, 8, 64, 16, 512, 0), abi.Frame(num_tokens=20)
    device = CudaDevice(FakeCuda(abi.CUDA), 1)  # type: ignore[arg-type]
    text = "scatter of 20 tokens and 8 heads, rows of 512 bytes, among 64 slots on cuda:1: CUDA error 0, out"
    with pytest.raises(DeviceError, match=text):
        device.launch(layout, frame, 7, gathering=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A process that uses CUDA."""
    library = FakeCuda(0)
    monkeypatch.setattr(device_module, "cuda_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return library


def test_memory_is_pinned_and_unpinned_by_its_address(cuda: FakeCuda) -> None:
    unpin = pin(4096, 8192)
    assert unpin is not None
    unpin()
    assert cuda.calls == [("lmck_host_register", (4096, 8192)), ("lmck_host_unregister", (4096,))]


def test_memory_that_cannot_be_pinned_is_told_in_one_warning(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = 2
    with caplog.at_level(logging.WARNING):
        pool = MemoryPool(1 << 20, huge_pages=False)
        pool.close()
    [record] = caplog.records
    assert "1048576 bytes of frame memory can't be pinned (CUDA error 2, out of luck)" in record.message
    assert [name for name, _ in cuda.calls] == ["lmck_host_register"]


def test_a_process_that_does_not_use_cuda_pins_nothing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert pin(4096, 8192) is None
    assert not cuda.calls


@pytest.mark.parametrize("leased", [False, True], ids=["unused", "with a view that outlives it"])
def test_a_pool_is_unpinned_once_while_its_memory_is_still_there(
    leased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, events = SimpleNamespace(address=0, nbytes=0), []

    def fake_pin(address: int, nbytes: int) -> Callable[[], None]:
        pinned.address, pinned.nbytes = address, nbytes
        return lambda: events.append(ctypes.string_at(address, 4))  # a crash where it is unmapped

    monkeypatch.setattr(mapping, "pin", fake_pin)
    pool = MemoryPool(1 << 20, huge_pages=False)
    assert (pinned.address, pinned.nbytes) == (pool.base_address, 1 << 20)
    pool.buffer[:4] = b"here"
    view = None
    if leased:
        lease = pool.try_allocate(4096, owner="test")
        assert lease is not None
        view = lease.memory[:]
        lease.release()
    pool.close()
    assert events == ([] if leased else [b"here"])
    del view, pool
    if leased:
        del lease
    gc.collect()
    assert events == [b"here"]
