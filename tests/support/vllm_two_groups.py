"""vLLM: a rank with two attention groups over one memory tier, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.plan import Load, Save, Step
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.engine import CacheEngine
from lmcache_core.identity import Content, ModelRecord, NamedContent, Part
from lmcache_core.kernels import OpaqueBlocks

BLOCK, CHUNK, WINDOW = 16, 64, 40
FULL = Group(BLOCK)
MODEL = ModelRecord(weights="w", config={}, chunk_tokens=CHUNK)
PROMPT = list(range(330))


def part(group: str) -> Part:
    return Part(layers=(0, 2), heads=(0, 2), content_format="test", content_nbytes=8, group=group)


def content(num_tokens: int = len(PROMPT)) -> Content:
    made = Content(MODEL)
    made.extend(PROMPT[:num_tokens])
    return made


class Zeros:
    def gather(self, first_token: int, num_tokens: int, payload: Any) -> None:
        for segment in payload:
            segment[:] = bytes(len(segment))


class Rank:
    """A rank with a group of full attention and one with a window, 40 numbered blocks each."""

    def __init__(self, engine: CacheEngine, window: int = WINDOW) -> None:
        groups = [FULL, Group(BLOCK, window=window)]
        self.cache = GroupedCache(groups, [engine, engine.beside(part("window"))])
        shape = (40, 2, BLOCK, 2)
        self.kv = [
            [torch.randn(shape, generator=torch.Generator().manual_seed(10 * g + i)) for i in range(2)]
            for g in range(2)
        ]
        self.blocks = [OpaqueBlocks(layers) for layers in self.kv]
        self.lost: list[int] = []
        self.side = WorkerSide(self.cache, self.blocks, rank=0, on_lost=self.lost.append)

    def keep(self, group: int, num_tokens: int, skip: int = 0) -> None:
        mask = [False] * skip + [True] * (num_tokens - skip)
        self.cache.engines[group].store(content(num_tokens), Zeros(), mask=mask)

    def save(self, num_tokens: int, full: list[int], window: list[int]) -> None:
        names = NamedContent.of(content(), num_tokens)
        self.side.save(Step(saves=[Save(request_id="r", content=names, block_ids=[full, window])], number=1))

    def load(self, first: int, end: int, full: list[int], window: list[int]) -> tuple[set[str], set[str]]:
        num_tokens, ids = self.cache.hold(content(), len(PROMPT))
        load = Load(
            request_id="r",
            content=NamedContent.of(content(), num_tokens),
            first=first,
            end=end,
            block_ids=[full, window],
            lookup_ids=[ids],
        )
        self.side.load(Step(loads=[load], number=1))
        assert self.pins() == 0
        return self.side.arrived()

    def held(self, group: int, skip: int, num_tokens: int) -> int:
        hashes = content().hashes[skip // CHUNK : num_tokens // CHUNK]
        return self.cache.engines[group].lookup(hashes=hashes).num_tokens

    def hit(self, limit: int = len(PROMPT)) -> int:
        num_tokens, ids = self.cache.hold(content(), limit)
        self.cache.release(ids)
        assert self.pins() == 0
        return num_tokens

    def pins(self) -> int:
        return len(self.cache.engines[0]._chain.pins.active())


@contextmanager
def two_groups(window: int = WINDOW) -> Iterator[Rank]:
    config = {"chunk_tokens": CHUNK, "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "8MiB"}]}
    with CacheEngine(config, model=MODEL, part=part("full")) as engine:
        yield Rank(engine, window)
