"""The engine over a tier without room, or with more to write than it takes: never wrong, never in the way."""

from __future__ import annotations

import threading

import pytest
from cache_scenario import (
    CHUNK,
    CONTENT,
    HEADS,
    LAYERS,
    BlankKV,
    Recorder,
    cpu,
    eventually,
    prompt,
    retrieve,
    settle,
    store,
)
from faulty_backends import PATIENCE_S, Controls, build, remote

from lmcache_core.events import StoreShed
from lmcache_core.identity import Part
from lmcache_core.tiers import StorageTier
from lmcache_core.tiers.index import IndexStats

DEADLINE_S = 1.0


def test_an_eviction_whose_delete_fails_sheds_the_store_and_keeps_the_bound() -> None:
    controls = Controls()
    with build(controls, remote(capacity="128KiB")) as engine:
        for seed in range(4):
            store(engine, prompt(30 + seed, 2 * CHUNK))
            settle(engine)
        controls.fail = lambda op, key: op == "delete"
        for seed in range(4):
            store(engine, prompt(40 + seed, 2 * CHUNK))
            settle(engine)
            assert sum(len(value) for value, _ in controls.values.values()) <= 128 << 10
        controls.fail = lambda op, key: False
        assert store(engine, prompt(50, 2 * CHUNK)) == 2 * CHUNK
        settle(engine)
        assert retrieve(engine, prompt(50, 2 * CHUNK)) == 2 * CHUNK


def test_a_store_that_is_full_below_its_bound_is_tried_once_more_with_room_made() -> None:
    controls = Controls()
    with build(controls, remote()) as engine:
        for seed in range(4):
            store(engine, prompt(32 + seed, CHUNK))
            settle(engine)
        controls.room = 0  # whatever leaves
        puts = controls.items["put"]
        store(engine, prompt(36, CHUNK))
        settle(engine)
        assert controls.items["put"] == puts + 2
        assert controls.items["delete"] == 1


def test_a_write_given_up_while_its_store_turns_out_full_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controls = Controls()
    tokens = prompt(54, CHUNK)
    with build(controls, remote()) as engine:
        store(engine, prompt(55, CHUNK))
        settle(engine)
        tier = engine._chain.tiers[0]
        assert isinstance(tier, StorageTier)
        (key,) = engine.content(tokens).keys(engine.part)
        stats = tier.index.stats

        def withdrawn_meanwhile() -> IndexStats:
            tier.writes.withdraw(key)
            return stats()

        monkeypatch.setattr(tier.index, "stats", withdrawn_meanwhile)
        controls.room = 0
        puts = controls.items["put"]
        store(engine, tokens)
        assert engine.flush(PATIENCE_S)
        monkeypatch.undo()
        settle(engine)
        assert controls.items["put"] == puts + 1
        controls.room = None
        store(engine, tokens)
        settle(engine)
        assert retrieve(engine, tokens) == CHUNK


def test_the_rest_of_a_prompt_does_not_push_its_beginning_out() -> None:
    controls = Controls()
    tokens = prompt(37, 8 * CHUNK)
    with build(controls, remote(capacity="72KiB")) as engine:  # the model's record and four chunks
        store(engine, tokens[: 4 * CHUNK])
        settle(engine)
        store(engine, tokens)
        settle(engine)
        assert engine.lookup(tokens).num_tokens == 4 * CHUNK


def test_what_cannot_be_deleted_is_not_cleared() -> None:
    controls = Controls()
    tokens = prompt(38, 2 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        controls.fail = lambda op, key: op == "delete"
        assert engine.clear(tokens) == {"remote": 0}
        assert retrieve(engine, tokens) == 2 * CHUNK
        controls.fail = lambda op, key: False
        assert engine.clear(tokens) == {"remote": 2}
        settle(engine)


def test_a_close_gives_up_what_a_hung_store_keeps_waiting() -> None:
    controls = Controls()
    recorder = Recorder()
    with build(controls, remote(max_in_flight=1, in_flight_bytes="128KiB"), recorder=recorder) as engine:
        entered = controls.hang("put")
        store(engine, prompt(40, 8 * CHUNK))
        assert entered.wait(PATIENCE_S)
        tier = engine._chain.tiers[0]
        assert isinstance(tier, StorageTier)
        assert eventually(lambda: tier.writes._waiting)
        engine.close(timeout_s=0.1)
        assert any(shed.reason == "closing" for shed in recorder.of(StoreShed))
        controls.let_go("put")
        assert eventually(lambda: not engine._chain.pool.stats().leases)
        assert engine._chain.pool.stats().lost_leases == 0


def test_a_close_waits_no_longer_than_a_call_may_take_for_writes_of_which_none_ends() -> None:
    controls = Controls()
    engine = build(controls, remote(max_in_flight=1, in_flight_bytes="128KiB", deadline=DEADLINE_S))
    entered = controls.hang("put")
    store(engine, prompt(41, 8 * CHUNK))
    assert entered.wait(PATIENCE_S)
    closing = threading.Thread(target=engine.close, args=(1e6,), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    controls.let_go("put")
    assert eventually(lambda: not engine._chain.pool.stats().leases)


def test_writes_that_were_given_up_leave_their_place_in_the_queue() -> None:
    controls = Controls()
    recorder = Recorder()
    hung = remote(max_in_flight=1, in_flight_bytes="128KiB", queue=2)
    with build(controls, cpu(), hung, recorder=recorder) as engine:
        tier = engine._chain.tiers[1]
        assert isinstance(tier, StorageTier)
        waiting = tier.writes._waiting
        controls.hang("put")
        for seed in range(8):  # some run, two wait, the rest is shed
            store(engine, prompt(100 + seed, CHUNK))
            pumped = threading.Event()
            tier.behind(pumped.set)
            assert pumped.wait(PATIENCE_S)
        assert len(waiting) == 2
        assert any(shed.reason == "queue full" for shed in recorder.of(StoreShed))
        for write in tuple(waiting):
            tier.writes.withdraw(write.key)
        recorder.events.clear()
        tokens = prompt(110, 2 * CHUNK)
        store(engine, tokens)
        assert not recorder.of(StoreShed)
        controls.let_go("put")
        settle(engine)
        assert retrieve(engine, tokens, search_range=["remote"]) == 2 * CHUNK


def test_a_put_waits_for_the_room_that_another_ones_victim_leaves() -> None:
    controls = Controls()
    deeper = Part(layers=(0, 4 * LAYERS), heads=(0, HEADS), content_format="test 64", content_nbytes=CONTENT)
    with build(controls, cpu(), remote(capacity="68KiB")) as engine:  # the model's record, a deeper chunk
        tier = engine._chain.tiers[1]
        assert isinstance(tier, StorageTier)
        engine.beside(deeper).store(prompt(44, CHUNK), BlankKV())
        settle(engine)
        puts = controls.items["put"]
        deleting = controls.hang("delete")
        store(engine, prompt(45, CHUNK))
        assert deleting.wait(PATIENCE_S)
        store(engine, prompt(46, CHUNK))  # there is room for it, too, once the deeper chunk has left
        assert eventually(lambda: len(tier.writes._ready) == 1)
        assert controls.items["put"] == puts
        controls.let_go("delete")
        settle(engine)
        assert controls.items["put"] == puts + 2
        assert controls.calls["delete"] == 1


@pytest.mark.parametrize("tier", [cpu(), remote()], ids=["cpu", "remote"])
def test_what_is_pinned_is_not_cleared(tier: dict[str, object]) -> None:
    tokens, other = prompt(49, 2 * CHUNK), prompt(50, CHUNK)
    with build(Controls(), tier) as engine:
        store(engine, tokens)
        store(engine, other)
        settle(engine)
        pinned = engine.pin(tokens)
        assert engine.clear() == {tier["name"]: 1}
        assert retrieve(engine, tokens) == 2 * CHUNK
        engine.unpin(pinned.lookup_id)
        assert engine.clear() == {tier["name"]: 2}
        settle(engine)
