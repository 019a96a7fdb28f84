"""One group of layers that attend to everything: a cache engine, and requests made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.lookups import LocalLookups, Lookups
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.engine import CacheEngine
from lmcache_core.identity import Content, ModelRecord, Part

CHUNK = 256
GROUPS = (Group(128),)
PART = Part(layers=(0, 2), heads=(0, 1), content_format="test", content_nbytes=8)
PROMPT = list(range(3, 703))


class Blocks:
    """KV that a test stores: only its names matter here."""

    def gather(self, first_token: int, num_tokens: int, payload: Any) -> None:
        for segment in payload:
            segment[:] = bytes(len(segment))


def alone(engine: CacheEngine) -> GroupedCache:
    return GroupedCache(GROUPS, [engine])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """An arrival that never ends by itself."""

    def __init__(self) -> None:
        self.done = False
        self.sources: list[tuple[str, int]] = []
        self.cancelled = False

    def wait(self, timeout_s: float | None = None) -> int:
        return 0

    def cancel(self) -> None:
        self.cancelled = True


@contextmanager
def one_engine() -> Iterator[CacheEngine]:
    config = {"chunk_tokens": CHUNK, "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "8MiB"}]}
    model = ModelRecord(weights="w", config={}, chunk_tokens=CHUNK)
    with CacheEngine(config, model=model, part=PART) as engine:
        yield engine


def side_of(lookups: Lookups, **changes: Any) -> SchedulerSide:
    options: dict[str, Any] = {
        "num_blocks": 100,
        "loads": True,
        "saves": True,
        "tails": True,
        "prefetch_deadline_s": 2.0,
        "prefetches": 1,
        "pin_ttl_s": 60.0,
    }
    return SchedulerSide(lookups, GROUPS, **(options | changes))


class Far(LocalLookups):
    """With a slower tier behind it that never answers."""

    def __init__(self, engine: CacheEngine) -> None:
        super().__init__(alone(engine))
        self.has_far_tiers = True
        self.arrivals: list[Slow] = []
        self.asked: list[Content] = []

    def bring_near(self, content: Content) -> Slow:
        self.asked.append(content)
        self.arrivals.append(Slow())
        return self.arrivals[-1]


def request(tokens: list[int] | None = PROMPT, name: str = "r", **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "num_tokens": len(tokens or ()),
        "num_prompt_tokens": len(tokens or ()),
        "num_computed_tokens": 0,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "pooling_params": None,
        "block_hashes": [tuple((tokens or ())[:end]) for end in range(128, len(tokens or ()) + 1, 128)],
    }
    return SimpleNamespace(**(fields | changes))


def planned(side: SchedulerSide, **num_scheduled: int) -> Any:
    step = side.step()
    blocks = SimpleNamespace(get_block_ids=lambda request_id: ([1, 2, 3, 4, 5, 6],))
    scheduled = SimpleNamespace(num_scheduled_tokens=num_scheduled, kv_connector_block_state=blocks)
    side.plan_saves(step, scheduled)
    return step


def saved(step: Any) -> dict[str, int]:
    """Request → the tokens of it that the step saves."""
    return {save.request_id: save.content.num_tokens for save in step.saves}


def keep(engine: CacheEngine, tokens: list[int]) -> None:
    engine.store(engine.content(tokens), Blocks())


def num_pins(engine: CacheEngine) -> int:
    return len(engine._chain.pins.active())
