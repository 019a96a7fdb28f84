"""vLLM: a hit's tokens are counted for the tiers that they came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.hits import split_by_tier
from lmcache_core.connectors.vllm.lookups import Held, LocalLookups
from lmcache_core.connectors.vllm.plan import Report
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.engine import CacheEngine
from lmcache_core.identity import ModelRecord, Part

BLOCK, CHUNK = 128, 256
PROMPT = list(range(3, 703))
MEDIUMS = {"cpu": "memory", "disk": "file"}


class Blocks:
    def gather(self, first_token: int, num_tokens: int, payload: Any) -> None:
        for segment in payload:
            segment[:] = bytes(len(segment))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CacheEngine]:
    config = {
        "chunk_tokens": CHUNK,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "8MiB"},
            {"name": "disk", "backend": "disk", "capacity": "8MiB", "options": {"path": str(tmp_path)}},
        ],
    }
    model = ModelRecord(weights="w", config={}, chunk_tokens=CHUNK)
    part = Part(layers=(0, 2), heads=(0, 1), content_format="test", content_nbytes=8)
    with CacheEngine(config, model=model, part=part) as engine:
        yield engine


@pytest.fixture
def ask(engine: CacheEngine) -> Iterator[Callable[[str, int], Mapping[str, int]]]:
    """Asks for `PROMPT`, of which vLLM has some tokens, takes what is offered, and returns its tiers."""
    told: list[Mapping[str, int]] = []
    lookups = LocalLookups(GroupedCache([Group(BLOCK)], [engine]))
    side = SchedulerSide(
        lookups,
        [Group(BLOCK)],
        num_blocks=100,
        loads=True,
        saves=True,
        tails=True,
        prefetch_deadline_s=60.0,
        prefetches=8,
        pin_ttl_s=60.0,
        on_hit=told.append,
    )

    def ask(name: str, num_local: int) -> Mapping[str, int]:
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=PROMPT,
            all_token_ids=PROMPT,
            num_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_hashes=[*range(len(PROMPT) // BLOCK)],
            cache_salt=None,
            lora_request=None,
            mm_features=[],
            pooling_params=None,
        )
        while (offer := side.matched(request, num_local)[0]) is None:
            pass  # each question waits a little for the tiers
        side.allocated(request, ([1, 2, 3, 4, 5, 6],), offer)
        assert sum(side.hit_by_tier(name).values()) == offer
        assert told.pop() == side.hit_by_tier(name)
        step = side.step()
        for load in step.loads:
            lookups.release(Held(0, load.lookup_ids))
        side.reported(Report(step=step.number, failed={}))
        return side.hit_by_tier(name)

    yield ask
    side.close()


def test_what_was_in_memory_counts_for_it_and_what_came_from_disk_for_that(
    engine: CacheEngine, ask: Callable[[str, int], Mapping[str, int]]
) -> None:
    engine.store(engine.content(PROMPT[:640]), Blocks())
    assert engine.flush()
    assert ask("warm", 0) == {"cpu": 640}
    engine.clear(search_range=["cpu"])
    engine.prefetch(PROMPT, limit=CHUNK).wait(30.0)
    assert ask("half", 128) == {"cpu": 128, "disk": 384}
    assert ask("again", 0) == {"cpu": 640}
    engine.clear(search_range=["cpu"])
    assert ask("cold", 0) == {"disk": 640}


@pytest.mark.parametrize(
    ("first", "end", "sources", "counts"),
    [
        (0, 100, [], {"cpu": 100}),
        (10, 100, [("disk", 50)], {"disk": 40, "cpu": 50}),
        (0, 100, [("disk", 80), ("disk", 80)], {"disk": 100}),
        (60, 100, [("disk", 50), ("cpu", 50)], {"cpu": 40}),
        (0, 60, [("cpu", 20), ("disk", 20), ("cpu", 20)], {"cpu": 40, "disk": 20}),
        (50, 50, [("disk", 50)], {}),
        (10, 60, [("", 30), ("disk", 30)], {"cpu": 20, "disk": 30}),
    ],
)
def test_the_tokens_of_a_hit_are_split_by_where_they_lie_in_the_prompt(
    first: int, end: int, sources: list[tuple[str, int]], counts: dict[str, int]
) -> None:
    assert split_by_tier(first, end, sources, MEDIUMS) == counts
