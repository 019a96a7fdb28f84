"""The engine over a tier that hangs, fails, lies or comes and goes: never wrong, never in the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from itertools import count
from random import Random

import pytest
from cache_scenario import (
    CHUNK,
    OracleKV,
    Recorder,
    config_of,
    cpu,
    engine_of,
    eventually,
    prompt,
    retrieve,
    settle,
    store,
)
from faulty_backends import PATIENCE_S, Controls, build, faulty, remote

from lmcache_core.config import load_config
from lmcache_core.engine import CacheEngine, explain
from lmcache_core.errors import BackendUnavailable, ConfigError, PermissionDenied
from lmcache_core.events import BreakerChanged, FrameRejected, StoreShed, TierDown, TierFailed, TierUp
from lmcache_core.sdk import BackendSpec
from lmcache_core.storage import Capabilities
from lmcache_core.tiers import StorageTier

DEADLINE_S = 1.0
SLACK_S = 3.0  # for a busy machine; a hang would be 60 s


def timed_retrieve(engine: CacheEngine, tokens: object) -> tuple[int, float]:
    started = time.monotonic()
    return retrieve(engine, tokens), time.monotonic() - started  # type: ignore[arg-type]


def test_a_hanging_read_costs_its_deadline_and_everything_heals() -> None:
    controls = Controls()
    tokens = prompt(1, 6 * CHUNK)
    with build(controls, remote(deadline=DEADLINE_S)) as engine:
        store(engine, tokens)
        settle(engine)
        inside = controls.hang("get")
        loaded, seconds = timed_retrieve(engine, tokens)
        assert inside.is_set()
        assert loaded == 0
        assert seconds < DEADLINE_S + SLACK_S
        controls.let_go("get")
        settle(engine)
        assert retrieve(engine, tokens) == 6 * CHUNK
        settle(engine)


def test_a_hanging_write_holds_up_neither_store_nor_close() -> None:
    controls = Controls()
    engine = build(controls, cpu(), remote())
    inside = controls.hang("put")
    started = time.monotonic()
    assert store(engine, prompt(2, 6 * CHUNK)) == 6 * CHUNK
    assert time.monotonic() - started < SLACK_S
    assert inside.wait(PATIENCE_S)
    assert retrieve(engine, prompt(2, 6 * CHUNK)) == 6 * CHUNK
    started = time.monotonic()
    engine.close(0.2)
    assert time.monotonic() - started < 0.2 + SLACK_S
    controls.let_go("put")


def test_a_put_that_lands_after_its_deadline_is_found() -> None:
    controls = Controls()
    recorder = Recorder()
    tokens = prompt(31, 2 * CHUNK)
    with build(controls, remote(deadline=DEADLINE_S), recorder=recorder) as engine:
        entered = controls.hang("put")
        store(engine, tokens)
        assert entered.wait(PATIENCE_S)
        assert eventually(lambda: any(shed.reason == "deadline" for shed in recorder.of(StoreShed)))
        assert engine.lookup(tokens).num_tokens == 0
        controls.let_go("put")
        settle(engine)
        landed = {key for key in controls.values if key.startswith("c-")}
        assert set(engine._chain.tiers[0].index.keys("c-")) == landed
        assert retrieve(engine, tokens) == CHUNK * len(landed)


def test_a_store_that_fails_one_get_in_five_only_ever_costs_misses() -> None:
    controls = Controls()
    calls = count()
    controls.fail = lambda op, key: op == "get" and next(calls) % 5 == 4
    prompts = [prompt(10 + i, 6 * CHUNK) for i in range(8)]
    with build(controls, remote()) as engine:
        for tokens in prompts:
            store(engine, tokens)
        settle(engine)
        loaded = [retrieve(engine, tokens) for tokens in prompts * 4]
        settle(engine)
    assert max(loaded) == 6 * CHUNK
    assert sum(loaded) > 0.5 * len(loaded) * 6 * CHUNK


def test_values_swapped_behind_our_back_are_rejected_and_repaired_by_the_next_store() -> None:
    controls = Controls()
    recorder = Recorder()
    tokens = prompt(20, 4 * CHUNK)
    with build(controls, remote(), recorder=recorder) as engine:
        store(engine, tokens)
        settle(engine)
        first, second = engine.content(tokens).keys(engine.part)[:2]
        controls.values[first], controls.values[second] = controls.values[second], controls.values[first]
        assert retrieve(engine, tokens) == 0
        settle(engine)
        assert {event.key for event in recorder.of(FrameRejected)} == {first, second}
        assert store(engine, tokens) == 2 * CHUNK
        settle(engine)
        assert retrieve(engine, tokens) == 4 * CHUNK


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "empty"])
def test_a_damaged_value_is_a_miss_and_never_served(damage: str) -> None:
    controls = Controls()
    tokens = prompt(21, 3 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        victim = engine.content(tokens).keys(engine.part)[1]
        value, parent = controls.values[victim]
        damaged = {
            "flip": value[:5000] + bytes([value[5000] ^ 64]) + value[5001:],
            "truncate": value[:-4096],
            "grow": value + bytes(4096),
            "empty": b"",
        }[damage]
        controls.values[victim] = (damaged, parent)
        assert retrieve(engine, tokens) == CHUNK
        settle(engine)
        assert engine.lookup(tokens).num_tokens == CHUNK
        assert store(engine, tokens) == CHUNK
        settle(engine)
        assert retrieve(engine, tokens) == 3 * CHUNK


def test_a_value_deleted_behind_our_back_is_a_miss() -> None:
    controls = Controls()
    tokens = prompt(22, 3 * CHUNK)
    with build(controls, remote()) as engine:
        store(engine, tokens)
        settle(engine)
        del controls.values[engine.content(tokens).keys(engine.part)[2]]
        assert retrieve(engine, tokens) == 2 * CHUNK
        assert engine.lookup(tokens).num_tokens == 2 * CHUNK
        settle(engine)


def test_the_breaker_leaves_a_dead_tier_alone_and_says_so() -> None:
    controls = Controls()
    recorder = Recorder()
    tokens = prompt(23, 4 * CHUNK)
    with build(controls, remote(breaker={"failures": 3, "cool_down": 3600}), recorder=recorder) as engine:
        store(engine, tokens)
        settle(engine)
        controls.fail = lambda op, key: True
        for _ in range(4):
            retrieve(engine, tokens)
            settle(engine)
        asked = controls.calls["get"]
        assert [event.state for event in recorder.of(BreakerChanged)] == ["open"]
        assert retrieve(engine, tokens) == 0
        assert controls.calls["get"] == asked


def test_a_store_that_cannot_be_reached_at_start_leaves_the_tier_down_until_it_can() -> None:
    controls = Controls()
    recorder = Recorder()
    controls.open_error = BackendUnavailable("connection refused")
    tokens = prompt(24, 2 * CHUNK)
    with build(controls, cpu(), remote(), recorder=recorder) as engine:
        assert [event.tier for event in recorder.of(TierDown)] == ["remote"]
        assert store(engine, tokens) == 2 * CHUNK
        assert retrieve(engine, tokens) == 2 * CHUNK
        controls.open_error = None
        tier = engine._chain.tiers[1]
        assert isinstance(tier, StorageTier)
        tier.retry_now()
        assert not tier.usable  # the first look starts it, and doesn't wait
        assert eventually(lambda: bool(recorder.of(TierUp)))
        assert store(engine, tokens) == 0
        settle(engine)
        assert engine.lookup(tokens, search_range=["remote"]).num_tokens == 2 * CHUNK


@pytest.mark.parametrize("error", [PermissionDenied("wrong password"), ConfigError("no such bucket")])
def test_a_tier_that_can_never_work_is_one_config_error(error: Exception) -> None:
    controls = Controls()
    controls.open_error = error
    with pytest.raises(ConfigError, match=str(error)):
        build(controls, cpu(), remote())


def test_a_backend_that_hangs_in_open_costs_its_deadline_and_comes_up_when_it_can() -> None:
    controls = Controls()
    recorder = Recorder()
    controls.hang("open")
    started = time.monotonic()
    with build(controls, cpu(), remote(deadline=DEADLINE_S), recorder=recorder) as engine:
        assert time.monotonic() - started < DEADLINE_S + SLACK_S
        (down,) = recorder.of(TierDown)
        assert f"{DEADLINE_S:g} s" in down.reason
        assert store(engine, prompt(25, CHUNK)) == CHUNK
        controls.let_go("open")
        assert eventually(lambda: bool(recorder.of(TierUp)))
        assert store(engine, prompt(26, CHUNK)) == CHUNK
        settle(engine)
        assert engine.lookup(prompt(26, CHUNK), search_range=["remote"]).num_tokens == CHUNK


def test_a_backend_that_opens_when_the_engine_is_closed_is_closed_too() -> None:
    controls = Controls()
    controls.hang("open")
    with build(controls, cpu(), remote(deadline=DEADLINE_S)) as engine:
        assert engine.stats().tiers[1].state == "down"
    assert controls.calls["close"] == 0
    controls.let_go("open")
    assert eventually(lambda: controls.calls["close"] == 1)


def test_a_config_error_that_comes_late_leaves_the_tier_down_with_its_reason() -> None:
    controls = Controls()
    recorder = Recorder()
    controls.hang("open")
    controls.open_error = ConfigError("no such bucket")
    with build(controls, cpu(), remote(deadline=DEADLINE_S), recorder=recorder):
        controls.let_go("open")
        assert eventually(lambda: any("no such bucket" in event.reason for event in recorder.of(TierDown)))


SHARED = Capabilities(medium="network", shared=True, persistent=True, scan=True, delete=True, max_in_flight=2)


def test_a_cold_lookup_asks_a_shared_store_twice_however_many_tails_there_are() -> None:
    controls = Controls()
    controls.capabilities = SHARED
    with build(controls, remote(capacity=None)) as engine:
        assert engine.lookup(prompt(27, 3 * CHUNK + 31)).num_tokens == 0
        assert controls.calls["stat"] == 2


@pytest.mark.parametrize("verb", ["lookup", "retrieve", "prefetch"])
def test_a_hung_shared_store_costs_a_request_one_deadline(verb: str) -> None:
    controls = Controls()
    controls.capabilities = SHARED
    tokens = prompt(28, 3 * CHUNK + 31)
    with build(controls, cpu(), remote(capacity=None, deadline=2 * DEADLINE_S)) as engine:
        controls.hang("stat")
        started = time.monotonic()
        if verb == "prefetch":
            prefetch = engine.prefetch(tokens)
            assert time.monotonic() - started < DEADLINE_S, "prefetch doesn't return at once"
            assert prefetch.wait(PATIENCE_S) == 0
        elif verb == "lookup":
            assert engine.lookup(tokens).num_tokens == 0
        else:
            assert retrieve(engine, tokens) == 0
        assert time.monotonic() - started < 4 * DEADLINE_S, "more than one deadline"
        controls.let_go("stat")
        settle(engine)


def test_a_lookup_that_pins_spends_its_deadline_on_a_hung_store_once() -> None:
    controls = Controls()
    controls.capabilities = SHARED
    tokens = prompt(29, 3 * CHUNK)
    with build(controls, cpu(), remote(capacity=None, deadline=DEADLINE_S)) as engine:
        store(engine, tokens[:CHUNK])
        settle(engine)
        controls.hang("stat")
        pinned = engine.lookup(tokens, pin=True)  # looks again when it has pinned
        assert pinned.num_tokens == CHUNK
        assert controls.calls["stat"] == 1, "more than one deadline"
        controls.let_go("stat")
        engine.lookup_unpin(pinned.lookup_id)
        settle(engine)


@pytest.mark.parametrize("nbytes", [0, 4096, 3 * 4096 + 1, 1 << 40])
def test_a_value_whose_length_no_frame_has_is_not_read(nbytes: int) -> None:
    controls = Controls()
    controls.capabilities = SHARED
    tokens = prompt(30, CHUNK)
    with build(controls, remote(capacity=None)) as engine:
        key = engine.content(tokens).keys(engine.part)[0]
        controls.values[key] = (Claimed(nbytes), None)  # type: ignore[assignment]
        assert retrieve(engine, tokens) == 0
        assert controls.calls["stat"] > 0
        assert controls.calls["get"] == 0
        settle(engine)


class Claimed:
    """A value of which only a length is known."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes


def test_failures_are_counted_logged_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    controls = Controls()
    recorder = Recorder()
    with build(controls, remote(), recorder=recorder) as engine:
        store(engine, prompt(29, 4 * CHUNK))
        settle(engine)
        controls.fail = lambda op, key: True
        retrieve(engine, prompt(29, 4 * CHUNK))
        store(engine, prompt(30, 4 * CHUNK))
        settle(engine)
        (remote_stats,) = engine.stats().tiers
    assert {event.operation for event in recorder.of(TierFailed)} == {"get", "put"}
    assert remote_stats.counters["failed: put"] == remote_stats.counters["shed: failed"] == 4
    assert "told to fail" in remote_stats.last_error
    lines = [record for record in caplog.records if "told to fail" in record.getMessage()]
    assert len(lines) == 1


def test_explain_asks_a_shared_store_what_it_holds() -> None:
    controls = Controls()
    controls.capabilities = SHARED
    tokens = prompt(31, 3 * CHUNK + 16)
    with build(controls, remote(capacity=None)) as engine:
        store(engine, tokens)
        settle(engine)
        found = explain(load_config(config_of(remote(capacity=None))), tokens, registry=faulty(controls))
        assert found.verdict.startswith("It is a hit")
        other = explain(
            load_config(config_of(remote(capacity=None))), prompt(32, 64), registry=faulty(controls)
        )
        assert "No stored model holds the start" in other.verdict


def test_news_of_a_lost_copy_does_not_hide_a_newer_one() -> None:
    tokens = prompt(39, CHUNK)
    with build(Controls(), remote()) as engine:
        store(engine, tokens)
        settle(engine)
        tier = engine._chain.tiers[0]
        assert isinstance(tier, StorageTier)
        (key,) = engine.content(tokens).keys(engine.part)
        copy = tier.index.get(key)
        assert copy is not None
        copy.token = 5
        tier._lost([(key, 4)], "evicted")
        assert engine.lookup(tokens).num_tokens == CHUNK
        tier._lost([(key, 5)], "evicted")
        assert engine.lookup(tokens).num_tokens == 0


def test_a_shared_store_is_asked_for_what_others_put_there() -> None:
    controls = Controls()
    controls.capabilities = Capabilities(medium="network", shared=True, persistent=True, max_in_flight=2)
    tokens = prompt(60, 4 * CHUNK + 16)
    with build(controls, remote(capacity=None)) as writer, build(controls, remote(capacity=None)) as reader:
        assert reader.lookup(tokens).num_tokens == 0
        store(writer, tokens)
        settle(writer)
        assert reader.lookup(tokens).num_tokens == 4 * CHUNK + 16
        assert retrieve(reader, tokens) == 4 * CHUNK + 16
        controls.values.clear()
        assert retrieve(reader, tokens) == 0
        assert reader.lookup(tokens).num_tokens == 0
        settle(reader)


def test_concurrent_retrieves_of_one_prompt_share_its_reads() -> None:
    controls = Controls()
    tokens = prompt(61, 6 * CHUNK)
    with build(controls, cpu(), remote()) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        inside = controls.hang("get")
        loaded: list[int] = []
        threads = [threading.Thread(target=lambda: loaded.append(retrieve(engine, tokens))) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert inside.wait(PATIENCE_S)
        joined = engine._chain._flights
        assert eventually(lambda: joined.num_waiting == 4 * 6)
        controls.let_go("get")
        for thread in threads:
            thread.join(PATIENCE_S)
        assert loaded == [6 * CHUNK] * 4
        assert controls.items["get"] == 6
        settle(engine)


def test_each_frame_comes_from_the_nearest_tier_that_has_it() -> None:
    tokens = prompt(51, 4 * CHUNK)
    with build(Controls(), cpu(), remote(promote="never")) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(tokens[:CHUNK], search_range=["cpu"])
        assert engine.lookup(tokens).tokens_by_tier == {"remote": CHUNK, "cpu": 3 * CHUNK}
        kv = OracleKV(tokens)
        assert engine.retrieve(tokens, kv).tokens_by_tier == {"remote": CHUNK, "cpu": 3 * CHUNK}
        settle(engine)


def test_a_frame_that_its_tier_cannot_give_is_had_from_a_farther_one() -> None:
    near, far = Controls(), Controls()
    registry = faulty(near)
    registry.add(
        BackendSpec(name="far", target="faulty_backends:Faulty", api=(1, 0)), faulty(far).load("faulty")
    )
    tokens = prompt(43, 4 * CHUNK)
    config = config_of(remote(), remote(name="farther", backend="far"))
    with engine_of(config, registry=registry) as engine:
        store(engine, tokens)
        settle(engine)
        keys = engine.content(tokens).keys(engine.part)
        near.fail = lambda op, key: op == "get" and key in keys[1:3]
        kv = OracleKV(tokens)
        assert engine.retrieve(tokens, kv).tokens_by_tier == {"remote": 2 * CHUNK, "farther": 2 * CHUNK}
        settle(engine)


def test_many_threads_over_small_full_tiers_never_see_foreign_kv() -> None:
    controls = Controls()
    flaky = Random(7)
    controls.fail = lambda op, key: flaky.random() < 0.05
    errors: list[BaseException] = []
    prompts = [prompt(70 + i % 5, (3 + i) * CHUNK + 16 * (i % 2)) for i in range(12)]
    config = config_of(
        cpu(capacity="256KiB"),
        remote(capacity="512KiB"),
        memory={"staging": "512KiB", "huge_pages": False},
    )
    with engine_of(config, registry=faulty(controls)) as engine:

        def work(seed: int) -> None:
            random = Random(seed)
            try:
                for _ in range(40):
                    tokens = random.choice(prompts)
                    retrieve(engine, tokens)
                    engine.store(tokens, OracleKV(tokens))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert not errors
        settle(engine)


def test_in_a_forked_child_an_engine_is_an_empty_cache_whatever_its_parent_was_doing() -> None:
    tokens = prompt(41, 2 * CHUNK)
    recorder = Recorder()
    with build(Controls(), cpu(), remote(), recorder=recorder) as engine:
        store(engine, tokens)
        settle(engine)
        chain = engine._chain
        told = len(recorder.events)
        locks = [tier.index._lock for tier in chain.tiers]
        locks += [engine._statistics._lock, chain._flights._lock, chain.pool._ledger.lock]
        with ExitStack() as held:  # as threads of the parent may hold them while another forks
            for lock in locks:
                held.enter_context(lock)
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)  # of a child that hangs
                empty = engine.lookup(tokens, pin=True).num_tokens == 0 == retrieve(engine, tokens)
                takes = store(engine, prompt(42, CHUNK))
                brought = engine.prefetch(tokens).wait()
                engine.close()
                os._exit(0 if empty and not takes and not brought and len(recorder.events) == told else 1)
            status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == 0
        assert retrieve(engine, tokens) == 2 * CHUNK
        settle(engine)
