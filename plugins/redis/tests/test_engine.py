"""Engines over cpu → redis: shared by processes, repaired by the next store, and never in the way."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
import yaml
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
from store_and_load import PROGRAM

from lmcache_core.engine import CacheEngine
from lmcache_core.events import BreakerChanged, TierDown, TierUp

from .servers import require
from .sites import Site
from .tiers import fresh_namespace

DEADLINE_S = 0.2
SLACK_S = 3.0  # for a busy machine; a hang would be far more
OUTAGE_S = 1.5
TOKENS = 6 * CHUNK


@pytest.fixture(scope="module")
def site() -> Site:
    return Site(require("redis"))


def redis_tier(site: Site, namespace: str, **settings: object) -> dict[str, object]:
    return {
        "name": "redis",
        "backend": "redis",
        "deadline": DEADLINE_S,
        "breaker": {"failures": 3, "cool_down": "100ms"},
        "options": site.options(namespace),
        **settings,
    }


def test_a_second_process_loads_what_the_first_has_stored(site: Site, tmp_path: Path) -> None:
    shared = redis_tier(site, fresh_namespace(), deadline="5s")
    config = {"tiers": [{"name": "memory", "backend": "cpu", "capacity": "4MiB"}, shared]}
    (tmp_path / "cache.yaml").write_text(yaml.safe_dump(config))

    def run(what: str) -> str:
        program = [sys.executable, "-c", PROGRAM, what]
        return subprocess.run(
            program, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run("store") == "992 True"
    assert run("load") == "{'redis': 992}"


def test_what_the_server_lost_is_computed_and_stored_again(site: Site) -> None:
    tokens, namespace = prompt(1, TOKENS), fresh_namespace()
    with engine_of(config_of(redis_tier(site, namespace, deadline="5s"))) as engine:
        assert store(engine, tokens) == TOKENS
        settle(engine)
        third = engine.content(tokens).keys(engine.part)[2]
        assert site.nodes[0].delete(f"{namespace}:{{{third}}}") == 1
        assert retrieve(engine, tokens) == 2 * CHUNK
        settle(engine)
        store(engine, tokens)
        settle(engine)
        assert retrieve(engine, tokens) == TOKENS
        settle(engine)


def test_an_engine_that_starts_before_its_server_uses_it_later(site: Site) -> None:
    recorder = Recorder()
    with site.killed():
        engine = engine_of(config_of(cpu(), redis_tier(site, fresh_namespace())), recorder=recorder)
        assert store(engine, prompt(2, TOKENS)) == TOKENS  # in memory
        assert retrieve(engine, prompt(2, TOKENS)) == TOKENS
        assert eventually(lambda: bool(recorder.of(TierDown)))
    with closing(engine):
        number = iter(range(3, 1000))

        def is_used() -> bool:
            store(engine, prompt(next(number), TOKENS))
            return bool(recorder.of(TierUp))

        assert eventually(is_used)
        assert store(engine, prompt(2000, TOKENS)) == TOKENS
        settle(engine)
        assert engine.lookup(prompt(2000, TOKENS), search_range=["redis"]).num_tokens == TOKENS


@pytest.mark.parametrize("kind", ["stopped", "killed"])
def test_an_outage_under_load_costs_time_outs_and_hits_return_by_themselves(site: Site, kind: str) -> None:
    recorder = Recorder()
    outage: Callable[[], AbstractContextManager[None]] = (
        site.servers[0].frozen if kind == "stopped" else site.killed
    )
    tier = redis_tier(site, fresh_namespace())
    with engine_of(config_of(cpu(capacity="128KiB"), tier), recorder=recorder) as engine:
        load = Load(engine)
        load.start()
        assert load.hits_come_from("redis")
        with outage():
            pause = threading.Event()
            pause.wait(OUTAGE_S)
        assert load.hits_come_from("redis")
        load.stop()
        settle(engine)
    assert load.errors == []
    assert max(load.seconds) < DEADLINE_S + SLACK_S
    assert any(event.tier == "redis" for event in recorder.of(BreakerChanged)), "nobody noticed"


class Load:
    """Two threads that store and retrieve prompts, more than memory holds, until they are stopped."""

    def __init__(self, engine: CacheEngine) -> None:
        self.errors: list[BaseException] = []
        self.seconds: list[float] = [0.0]
        self._engine = engine
        self._stopped = threading.Event()
        self._loaded: list[dict[str, int]] = []
        self._threads = [threading.Thread(target=self._run, args=(10 * number,)) for number in (1, 2)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def hits_come_from(self, tier: str) -> bool:
        """Whether something is loaded from there, from now on, before long."""
        before = len(self._loaded)
        return eventually(lambda: any(loaded.get(tier, 0) for loaded in self._loaded[before:]), 20.0)

    def _run(self, first: int) -> None:
        try:
            while not self._stopped.is_set():
                for seed in range(first, first + 8):
                    tokens = prompt(seed, TOKENS)
                    self._timed(lambda tokens=tokens: store(self._engine, tokens))  # type: ignore[misc]
                    self._timed(lambda tokens=tokens: self._retrieve(tokens))  # type: ignore[misc]
        except BaseException as error:  # told to the test
            self.errors.append(error)

    def _retrieve(self, tokens: array[int]) -> None:
        result = self._engine.retrieve(tokens, OracleKV(tokens))  # which checks every byte
        self._loaded.append(dict(result.tokens_by_tier))

    def _timed(self, call: Callable[[], object]) -> None:
        started = time.monotonic()
        call()
        self.seconds.append(time.monotonic() - started)
