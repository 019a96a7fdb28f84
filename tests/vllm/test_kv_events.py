"""KV events: a router learns from vLLM's publisher which of its blocks our tiers hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_events import Router, blocks, of, router
from vllm_session import Engine, Request, tokens

BLOCK = 128
PROMPT = tokens(700, seed=31)
WHOLE = PROMPT[: 5 * BLOCK]
"""Two chunks of 256 tokens and a tail of 128."""


@pytest.fixture
def listening() -> Iterator[Router]:
    with router() as each:
        yield each


def tiers(folder: Path, **options: object) -> dict[str, object]:
    path = {"path": str(folder), **options}
    return {
        "tiers": [
            {"name": "near", "backend": "cpu", "capacity": "64MiB"},
            {"name": "local", "backend": "disk", "capacity": "128MiB", "options": path},
        ]
    }


def test_a_router_learns_what_memory_and_disk_hold_in_vllm_s_own_terms(
    model: Path, log: Path, tmp_path: Path, listening: Router
) -> None:
    with Engine(
        model, log, tiers(tmp_path), enable_prefix_caching=True, kv_events_config=listening.config
    ) as engine:
        engine.generate(Request(PROMPT))
        engine.ask("stats")  # waits for what is being written
        engine.generate(Request(tokens(700, seed=32), salt="a tenant's"))  # a step that carries the news
        events = listening.events(lambda seen: len(blocks(of(seen, "BlockStored", "STORAGE"))) >= 5)
        own = blocks(of(events, "BlockStored", "GPU"))[:5]
        for medium, tier in (("CPU", "near"), ("STORAGE", "local")):
            stored = of(events, "BlockStored", medium)
            assert sorted(blocks(stored)) == sorted(own), "each once, and nothing of the request with a salt"
            stored.sort(
                key=lambda event: own.index(event.blocks[0])
            )  # a disk may end its writes in any order
            fields = [event.fields for event in stored]
            assert [token for each in fields for token in each["token_ids"]] == WHOLE
            assert [each["parent_block_hash"] for each in fields] == [None, own[1], own[3]]
            for each in fields:
                assert (each["block_size"], each["group_idx"]) == (BLOCK, 0)
                assert each["kv_cache_spec_kind"] == "full_attention"
                assert (each["ownership"], each["locality"]) == (tier, "LOCAL")

        engine.ask("clear", "near")
        engine.generate(Request(tokens(20, seed=33)))
        events = listening.events(lambda seen: bool(of(seen, "BlockRemoved", "CPU")))
        assert sorted(blocks(of(events, "BlockRemoved", "CPU"))) == sorted(own)
        assert not of(events, "BlockRemoved", "STORAGE")

        assert engine.ask("reset")
        engine.generate(Request(tokens(20, seed=34)))
        events = listening.events(lambda seen: bool(of(seen, "BlockRemoved", "STORAGE")))
        assert sorted(blocks(of(events, "BlockRemoved", "STORAGE"))) == sorted(own), "it is used no more"


def test_what_two_ranks_hold_is_told_once(model: Path, log: Path, tmp_path: Path, listening: Router) -> None:
    with Engine(
        model,
        log,
        tiers(tmp_path, processes=2),
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        kv_events_config=listening.config,
        tensor_parallel_size=2,
    ) as engine:
        engine.generate(Request(PROMPT, max_tokens=2))
        engine.generate(Request(tokens(20, seed=33), max_tokens=4))
        events = listening.events(lambda seen: len(blocks(of(seen, "BlockStored", "CPU"))) >= 5)
        stored = of(events, "BlockStored", "CPU")
        assert len(blocks(stored)) == 5
        assert [token for event in stored for token in event.fields["token_ids"]] == WHOLE
