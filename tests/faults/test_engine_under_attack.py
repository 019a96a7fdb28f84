"""What an attacker on inputs, sizes and timing found in the engine and its tiers, each with its proof."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cache_scenario import (
    CHUNK,
    CONTENT,
    HEADS,
    LAYERS,
    MODEL,
    BlankKV,
    OracleKV,
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
from faulty_backends import PATIENCE_S, Controls, build, faulty, remote

from lmcache_core.engine import CacheEngine
from lmcache_core.errors import ConfigError
from lmcache_core.events import Event, FrameRejected
from lmcache_core.identity import Content, HostScheme, ModelRecord, Part
from lmcache_core.storage import Capabilities

FRAME = 16_384
DEADLINE_S = 0.5
SLACK_S = 3.0  # for a busy machine; a hang would be 60 s


def test_content_of_another_model_is_refused() -> None:
    other = ModelRecord(weights="11" * 32, config={"architecture": "test"}, chunk_tokens=CHUNK)
    content = Content(other)
    content.extend(prompt(1, CHUNK))
    with engine_of(config_of(cpu())) as engine, pytest.raises(ValueError, match="made for model"):
        engine.store(content, OracleKV(prompt(1, CHUNK)))


def test_names_that_die_with_the_process_keep_out_of_persistent_tiers(tmp_path: Path) -> None:
    scheme = HostScheme(algorithm="sha256", seed=None, block_tokens=CHUNK)
    content = Content.from_host(MODEL, scheme, [bytes(32)])
    with (
        engine_of(config_of(cpu(), disk(tmp_path))) as engine,
        pytest.raises(ConfigError, match="random seed"),
    ):
        engine.store(content, OracleKV(prompt(2, CHUNK)))
    with engine_of(config_of(cpu())) as engine:
        assert engine.store(content, OracleKV(prompt(2, CHUNK))).num_tokens == CHUNK


def test_a_mask_without_a_true_moves_nothing_and_covers_whole_chunks_as_any_other() -> None:
    tokens = prompt(3, CHUNK + 16)
    with engine_of(config_of(cpu())) as engine:
        kv = OracleKV(tokens)
        for move in (engine.store, engine.retrieve):
            assert move(tokens[:CHUNK], kv, mask=[False] * CHUNK).num_tokens == 0
            with pytest.raises(ValueError, match=f"skips {CHUNK + 16} tokens, which is no multiple"):
                move(tokens, kv, mask=[False] * len(tokens))
            store(engine, tokens)
        assert (kv.gathered, kv.scattered) == ([], [])


def test_a_target_cannot_change_what_is_cached() -> None:
    class Vandal(OracleKV):
        def scatter(self, first_token: int, num_tokens: int, payload: object) -> None:
            payload[0][:4] = b"oops"  # type: ignore[index]

    tokens = prompt(4, CHUNK)
    with engine_of(config_of(cpu())) as engine:
        store(engine, tokens)
        with pytest.raises(TypeError):
            engine.retrieve(tokens, Vandal(tokens))
        assert retrieve(engine, tokens) == CHUNK
        settle(engine)


@pytest.mark.parametrize("tier", [cpu(capacity=5 * FRAME), remote(capacity=5 * FRAME)], ids=["cpu", "remote"])
def test_a_prompt_larger_than_its_tier_keeps_its_beginning(tier: dict[str, object]) -> None:
    tokens = prompt(5, 10 * CHUNK)
    with build(Controls(), tier) as engine:
        store(engine, tokens)
        settle(engine)
        assert retrieve(engine, tokens) == 4 * CHUNK
        settle(engine)


@pytest.mark.parametrize(
    "tier", [cpu(capacity=17 * FRAME), remote(capacity=17 * FRAME)], ids=["cpu", "remote"]
)
def test_storing_a_continuation_does_not_evict_what_it_continues(tier: dict[str, object]) -> None:
    tokens = prompt(6, 8 * CHUNK)
    with build(Controls(), tier) as engine:
        store(engine, tokens[: 4 * CHUNK])
        for seed in range(3):
            store(engine, prompt(60 + seed, 4 * CHUNK))
        settle(engine)
        mask = [False] * (4 * CHUNK) + [True] * (4 * CHUNK)
        engine.store(tokens, OracleKV(tokens), mask=mask)
        settle(engine)
        assert engine.lookup(tokens).num_tokens == 8 * CHUNK


def test_a_frame_that_needs_the_room_of_many_asks_a_store_for_no_more_deletes_at_once_than_it_takes() -> None:
    controls = Controls()
    controls.capabilities = replace(controls.capabilities, max_batch=1)
    deeper = Part(layers=(0, 4 * LAYERS), heads=(0, HEADS), content_format="test 64", content_nbytes=CONTENT)
    with build(controls, cpu(), remote(capacity=11 * FRAME)) as engine:
        for seed in range(10):
            store(engine, prompt(70 + seed, CHUNK))
        settle(engine)
        other = engine.beside(deeper)
        tokens = prompt(7, CHUNK)
        assert other.store(tokens, BlankKV()).num_tokens == CHUNK
        settle(engine)
        assert other.lookup(tokens, search_range=["remote"]).num_tokens == CHUNK
        assert controls.calls["delete"] == controls.items["delete"] > 1


def test_loads_that_are_more_than_may_wait_are_held_back_and_not_refused() -> None:
    controls = Controls()
    controls.capabilities = replace(controls.capabilities, max_batch=1, max_in_flight=8)
    tokens = prompt(8, 12 * CHUNK)
    with build(controls, remote(queue=4, max_in_flight=1)) as engine:
        for chunks in range(1, 13):  # no more at once than may wait
            store(engine, tokens[: chunks * CHUNK])
            settle(engine)
        assert engine.lookup(tokens).num_tokens == len(tokens)
        assert retrieve(engine, tokens) == len(tokens)
        settle(engine)


def test_without_a_memory_tier_waiting_writes_are_not_given_up_for_later_ones() -> None:
    controls = Controls()
    tokens = prompt(7, 200 * CHUNK)
    with build(controls, remote(), memory={"staging": "512KiB", "huge_pages": False}) as engine:
        inside = controls.hang("put")
        stored = store(engine, tokens)
        assert inside.wait(PATIENCE_S)
        controls.let_go("put")
        settle(engine)
        assert 0 < stored < 200 * CHUNK
        assert engine.lookup(tokens).num_tokens == stored


def test_a_victim_that_cannot_be_deleted_does_not_block_every_store() -> None:
    controls = Controls()
    with build(controls, remote(capacity=9 * FRAME)) as engine:
        for seed in range(4):
            store(engine, prompt(80 + seed, 2 * CHUNK))
            settle(engine)
        stuck = engine.content(prompt(80, 2 * CHUNK)).keys(engine.part)[1]
        controls.fail = lambda op, key: op == "delete" and key == stuck
        kept = 0
        for seed in range(10):
            store(engine, prompt(90 + seed, CHUNK))
            settle(engine)
            kept += engine.lookup(prompt(90 + seed, CHUNK)).num_tokens == CHUNK
        assert kept >= 6


def test_a_put_that_landed_but_answered_failed_still_counts_against_the_bound() -> None:
    controls = Controls()
    registry = faulty(controls)
    backend_class = registry.load("faulty")
    put_many = backend_class.put_many

    def lost_answer(self: object, items: object, call: object) -> None:
        class Mute:
            def done(self, index: int, outcome: object) -> None: ...

        put_many(self, items, Mute())  # type: ignore[arg-type]
        raise ConnectionResetError("after the request was sent")

    backend_class.put_many = lost_answer  # type: ignore[method-assign,assignment]
    controls.fail = lambda op, key: op == "delete"
    with engine_of(config_of(remote(capacity=16 * FRAME)), registry=registry) as engine:
        for seed in range(30):
            store(engine, prompt(100 + seed, 2 * CHUNK))
            settle(engine)
        assert sum(len(value) for value, _ in controls.values.values()) <= 16 * FRAME


def test_a_corrupt_copy_that_cannot_be_deleted_still_counts_and_is_not_promised() -> None:
    controls = Controls()
    tokens = prompt(8, 3 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        key = engine.content(tokens).keys(engine.part)[1]
        value, parent = controls.values[key]
        controls.values[key] = (value[:6000] + bytes([value[6000] ^ 1]) + value[6001:], parent)
        controls.fail = lambda op, key: op == "delete"
        used = engine.stats().tiers[0].used_bytes
        assert retrieve(engine, tokens) == CHUNK
        settle(engine)
        assert engine.stats().tiers[0].used_bytes == used
        assert engine.lookup(tokens).num_tokens == CHUNK
        assert store(engine, tokens) == CHUNK
        settle(engine)
        assert retrieve(engine, tokens) == 3 * CHUNK


@pytest.mark.parametrize("nbytes", [0, 5000, 64 << 20])
def test_a_kept_value_that_is_no_frame_spoils_only_itself(nbytes: int) -> None:
    controls = Controls()
    tokens = prompt(9, 4 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        key = engine.content(tokens).keys(engine.part)[2]
    controls.values[key] = (bytes(nbytes), controls.values[key][1])
    with build(controls, remote()) as engine:
        assert retrieve(engine, tokens) == 2 * CHUNK
        settle(engine)
        assert store(engine, tokens) == CHUNK
        settle(engine)
        assert retrieve(engine, tokens) == 4 * CHUNK


def test_a_value_that_cannot_be_read_while_others_can_is_written_anew() -> None:
    controls = Controls()
    tokens = prompt(10, 4 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        bad = engine.content(tokens).keys(engine.part)[2]
        controls.fail = lambda op, key: op == "get" and key == bad
        for _ in range(3):
            retrieve(engine, tokens)
            settle(engine)
        assert store(engine, tokens) == CHUNK
        controls.fail = lambda op, key: False
        settle(engine)
        assert retrieve(engine, tokens) == 4 * CHUNK


def test_while_reads_are_refused_what_is_computed_is_kept_in_memory() -> None:
    controls = Controls()
    tokens = prompt(11, 4 * CHUNK)
    with build(controls, cpu(), remote(breaker={"failures": 1, "cool_down": 3600})) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        controls.fail = lambda op, key: op == "get"
        assert retrieve(engine, tokens) == 0
        settle(engine)
        assert engine.lookup(tokens).num_tokens == 0
        assert store(engine, tokens) == 4 * CHUNK
        assert retrieve(engine, tokens) == 4 * CHUNK


def test_loads_and_stores_beyond_what_may_be_in_flight_wait_for_their_turn() -> None:
    controls = Controls()
    controls.capabilities = Capabilities(
        medium="network", delete=True, scan=True, persistent=True, max_in_flight=8
    )
    tokens = prompt(12, 100 * CHUNK)
    tiers = (cpu(capacity="8MiB"), remote(in_flight_bytes="256KiB"))
    with build(controls, *tiers, memory={"staging": "8MiB", "huge_pages": False}) as engine:
        store(engine, tokens)
        settle(engine)
        assert engine.lookup(tokens, search_range=["remote"]).num_tokens == 100 * CHUNK
        engine.clear(search_range=["cpu"])
        assert retrieve(engine, tokens) == 100 * CHUNK
        settle(engine)


def test_the_targets_time_is_not_the_tiers() -> None:
    controls = Controls()
    tokens = prompt(13, 8 * CHUNK)
    clock = threading.Event()

    class Slow(OracleKV):
        def scatter(self, first_token: int, num_tokens: int, payload: object) -> None:
            clock.wait(0.3)
            super().scatter(first_token, num_tokens, payload)  # type: ignore[arg-type]

    config = (remote(deadline=1), {"staging": "256KiB", "huge_pages": False})
    with build(controls, config[0], memory=config[1]) as engine:
        store(engine, tokens)
        settle(engine)
        assert engine.retrieve(tokens, Slow(tokens)).num_tokens == 8 * CHUNK


def test_an_observer_that_raises_base_exceptions_stops_nothing() -> None:
    class Cancelled:
        def on_event(self, event: Event) -> None:
            raise asyncio.CancelledError

    controls = Controls()
    tokens = prompt(14, 4 * CHUNK)
    with build(controls, cpu(), remote()) as engine:
        engine.subscribe(Cancelled())
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        engine.subscribe(Cancelled(), FrameRejected)
        key = engine.content(tokens).keys(engine.part)[1]
        controls.values[key] = (bytes(FRAME), None)
        retrieve(engine, tokens)
        assert retrieve(engine, tokens[:CHUNK]) == CHUNK
        settle(engine)


def test_two_prefetches_of_one_prompt_leave_one_copy() -> None:
    tokens = prompt(15, 8 * CHUNK)
    with build(Controls(), cpu(), remote()) as engine:
        store(engine, tokens)
        settle(engine)
        for _ in range(20):
            engine.clear(search_range=["cpu"])
            both = [engine.prefetch(tokens) for _ in range(2)]
            assert max(prefetch.wait(PATIENCE_S) for prefetch in both) == 8 * CHUNK
            settle(engine)


def test_an_interrupt_while_a_load_waits_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    controls = Controls()
    tokens = prompt(16, 3 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        controls.hang("get")

        def interrupted(self: object, timeout_s: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("lmcache_core.tiers.flights.Ticket.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.retrieve(tokens, OracleKV(tokens))
        controls.let_go("get")
        settle(engine)


def test_a_load_that_cannot_even_be_started_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(17, 3 * CHUNK)
    with build(Controls(), remote(deadline=600)) as engine:
        store(engine, tokens)
        settle(engine)

        def fail(*arguments: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("lmcache_core.tiers.reads.LoadJob.__init__", fail)
            assert retrieve(engine, tokens) == 0
        assert retrieve(engine, tokens) == 3 * CHUNK
        settle(engine)


def test_a_clear_of_a_hung_tier_costs_its_deadline_and_wedges_nothing() -> None:
    controls = Controls()
    controls.capabilities = Capabilities(
        medium="network", delete=True, scan=True, persistent=True, max_in_flight=1
    )
    with build(controls, remote(capacity=9 * FRAME, deadline=DEADLINE_S)) as engine:
        for seed in range(4):
            store(engine, prompt(120 + seed, 2 * CHUNK))
            settle(engine)
        controls.hang("delete")
        started = time.monotonic()
        assert engine.clear() == {"remote": 0}
        assert time.monotonic() - started < DEADLINE_S + SLACK_S
        controls.let_go("delete")
        assert eventually(lambda: store_and_find(engine))


@pytest.mark.parametrize("near", [[cpu()], []], ids=["memory tier", "none"])
@pytest.mark.parametrize("named", [True, False], ids=["one request", "everything"])
def test_what_is_being_written_during_a_clear_does_not_come_back(
    named: bool, near: list[dict[str, object]]
) -> None:
    controls = Controls()
    tokens = prompt(125, 4 * CHUNK)
    with build(controls, *near, remote(max_in_flight=1, in_flight_bytes=8 * FRAME)) as engine:
        entered = controls.hang("put")
        store(engine, tokens)
        assert entered.wait(PATIENCE_S)
        assert eventually(lambda: engine._chain.tiers[-1].writes._waiting)  # some run, and some wait
        cleared = threading.Thread(target=engine.clear, args=[tokens] if named else [])
        cleared.start()
        assert eventually(lambda: engine._chain.tiers[-1].writes._progress._waiting)  # it waits for the put
        controls.let_go("put")
        cleared.join(PATIENCE_S)
        assert not cleared.is_alive()
        settle(engine)
        assert engine.lookup(tokens).num_tokens == 0


def store_and_find(engine: CacheEngine) -> bool:
    store(engine, prompt(130, CHUNK))
    settle(engine)
    return engine.lookup(prompt(130, CHUNK)).num_tokens == CHUNK


def test_a_put_that_was_refused_before_it_was_asked_for_leaves_nothing_in_the_books() -> None:
    controls = Controls()
    with build(controls, remote(breaker={"failures": 1, "cool_down": 3600})) as engine:
        controls.fail = lambda op, key: True
        for seed in range(6):
            store(engine, prompt(140 + seed, 2 * CHUNK))
            settle(engine)
        asked = controls.items["put"]
        assert engine.stats().tiers[0].entries <= asked
        assert engine.lookup(prompt(145, 2 * CHUNK)).num_tokens == 0
