"""The memory a running request's KV lies in."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_models import llama
from transformers import DynamicCache

from lmcache_core.connectors.transformers.forward import cache_of
from lmcache_core.connectors.transformers.workspace import Batch, KVShape, RoomyLayer, Workspace

SHAPE = KVShape(num_layers=2, num_heads=3, dim=4, dtype=torch.float32)


def states(num_tokens: int, start: float, *, rows: int = 1) -> torch.Tensor:
    numel = rows * 3 * num_tokens * 4
    return torch.arange(start, start + numel).reshape(rows, 3, num_tokens, 4)


def room(num_tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.full((rows, 3, num_tokens, 4), float("nan"))


def test_a_roomy_layer_says_what_a_dynamic_layer_says_and_moves_nothing() -> None:
    ours, theirs = RoomyLayer(room(8), room(8)), DynamicCache()
    for count in (3, 1, 4):
        keys, values = states(count, count), states(count, 100 + count)
        ours.update(keys, values)
        theirs.update(keys, values, 0)
        assert torch.equal(ours.keys, theirs.layers[0].keys)
        assert torch.equal(ours.values, theirs.layers[0].values)
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.in_place
    assert ours.keys.data_ptr() == ours._room[0].data_ptr()


def test_a_roomy_layer_without_room_goes_on_outside_of_it() -> None:
    keys_room = room(4)
    layer = RoomyLayer(keys_room, room(4))
    layer.update(states(4, 0), states(4, 100))
    kept = keys_room.clone()
    layer.update(states(2, 50), states(2, 150))
    assert not layer.in_place
    assert layer.get_seq_length() == 6
    assert torch.equal(layer.keys[:, :, 4:], states(2, 50))
    assert torch.equal(keys_room, kept)


def test_a_cropped_layer_writes_over_what_was_cut_off() -> None:
    layer = RoomyLayer(room(8), room(8))
    layer.update(states(6, 0), states(6, 100))
    layer.crop(-2)
    layer.update(states(1, 70), states(1, 170))
    assert layer.in_place
    assert torch.equal(layer.keys, torch.cat([states(6, 0)[:, :, :4], states(1, 70)], dim=2))


def test_reordered_rows_no_longer_lie_in_the_room() -> None:
    layer = RoomyLayer(room(8, rows=2), room(8, rows=2))
    layer.update(states(2, 0, rows=2), states(2, 100, rows=2))
    layer.reorder_cache(torch.tensor([1, 1]))
    assert not layer.in_place
    layer.update(states(1, 40, rows=2), states(1, 140, rows=2))
    assert layer.get_seq_length() == 3


def test_a_reset_layer_starts_again_empty() -> None:
    layer = RoomyLayer(room(8), room(8))
    layer.update(states(2, 0), states(2, 100))
    layer.reset()
    assert layer.get_seq_length() == 0
    layer.update(states(3, 9), states(3, 109))
    assert torch.equal(layer.keys, states(3, 9))


def test_the_cache_is_a_real_dynamic_cache() -> None:
    workspace = Workspace(KVShape(num_layers=2, num_heads=2, dim=16, dtype=torch.float32))
    model = llama()
    with torch.inference_mode(), workspace.batch([5], 3) as batch:
        cache = cache_of(model, batch.row_layers(0, 0))
        model(torch.tensor([[3, 4, 5, 6, 7]]), cache=cache, use_cache=True)
        assert type(cache) is DynamicCache
        assert cache.get_seq_length() == 5
        assert all(layer.in_place for layer in cache.layers)


def fill(batch: Batch, value: float) -> None:
    for keys, values in batch.planes:
        keys.fill_(value)
        values.fill_(value)


def test_padding_is_cleared_of_an_earlier_requests_bytes() -> None:
    workspace = Workspace(SHAPE)
    with workspace.batch([9, 9], 0) as batch:
        fill(batch, float("nan"))
    with workspace.batch([2, 9], 0) as batch:
        assert batch.padding == [7, 0]
        for keys, values in batch.planes:
            assert not keys[0, :, :7].any()
            assert not values[0, :, :7].any()


def test_rows_are_gathered_and_scattered_by_their_own_positions() -> None:
    workspace = Workspace(SHAPE)
    with workspace.batch([3, 5], 2) as batch:
        for layer, (keys, values) in enumerate(batch.planes):
            keys.copy_(torch.arange(keys.numel()).view_as(keys) + 1000 * layer)
            values.copy_(-torch.arange(values.numel()).view_as(values))
        payload = [memoryview(bytearray(3 * 2 * 2 * 4 * 4)) for _ in range(2)]
        batch.row(0).gather(1, 2, payload)
        for (keys, values), memory in zip(batch.planes, payload, strict=True):
            packed = torch.frombuffer(memory, dtype=torch.float32).view(3, 2, 8)
            assert torch.equal(packed[:, :, :4], keys[0, :, 3:5])  # token 1 stands in slot 2 + 1
            assert torch.equal(packed[:, :, 4:], values[0, :, 3:5])
        batch.row(1).scatter(0, 2, payload)
        for keys, values in batch.planes:
            assert torch.equal(keys[1, :, 0:2], keys[0, :, 3:5])
            assert torch.equal(values[1, :, 0:2], values[0, :, 3:5])


def test_memory_is_reused_and_never_shared_by_two_requests_at_once() -> None:
    workspace = Workspace(SHAPE)
    with workspace.batch([64], 0) as batch:
        address = batch.planes[0][0].data_ptr()
    with workspace.batch([16], 0) as first, workspace.batch([16], 0) as second:
        assert first.planes[0][0].data_ptr() == address
        assert second.planes[0][0].data_ptr() != address
    with workspace.batch([64], 0) as batch:
        assert batch.planes[0][0].data_ptr() == address


def test_memory_comes_back_when_a_request_fails() -> None:
    workspace = Workspace(SHAPE)
    addresses: list[int] = []

    def failing_request() -> None:
        with workspace.batch([64], 0) as batch:
            addresses.append(batch.planes[0][0].data_ptr())
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        failing_request()
    with workspace.batch([64], 0) as batch:
        assert [batch.planes[0][0].data_ptr()] == addresses


def test_threads_get_memory_of_their_own() -> None:
    workspace = Workspace(SHAPE)
    inside = threading.Barrier(4, timeout=30)
    addresses: list[int] = []

    def request() -> None:
        with workspace.batch([32], 0) as batch:
            addresses.append(batch.planes[0][0].data_ptr())
            inside.wait()

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(addresses)) == 4
