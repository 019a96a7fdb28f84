"""vLLM: the worker's side by itself, over real tensors and a real cache engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.plan import Load, Save, Step
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.engine import CacheEngine, StoreResult
from lmcache_core.identity import Content, ModelRecord, NamedContent, Part
from lmcache_core.kernels import OpaqueBlocks

BLOCK, CHUNK, LAYERS, HEADS, DIM = 16, 32, 2, 2, 4
PART = Part(layers=(0, LAYERS), heads=(0, HEADS), content_format="test", content_nbytes=2 * DIM * 4)
PROMPT = list(range(100))


class Worker:
    """A worker with 20 blocks of numbered KV, and what it was told is lost."""

    def __init__(self, engine: CacheEngine) -> None:
        shape = (20, HEADS, BLOCK, 2 * DIM)
        self.kv = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(LAYERS)]
        self.lost: list[int] = []
        self.engine = engine
        cache = GroupedCache([Group(BLOCK)], [engine])
        self.side = WorkerSide(cache, [OpaqueBlocks(self.kv)], rank=0, on_lost=self.lost.append)
        self._step = 0

    def names(self, num_tokens: int, prompt: list[int] = PROMPT) -> NamedContent:
        content = Content(self.engine.model)
        content.extend(prompt)
        return NamedContent.of(content, num_tokens)

    def save(self, num_tokens: int, blocks: list[int], confirmed: int = 0, name: str = "r") -> None:
        self._step += 1
        save = Save(request_id=name, content=self.names(num_tokens), block_ids=[blocks])
        self.side.save(Step(saves=[save], number=self._step, confirmed=confirmed))

    def load(self, first: int, end: int, blocks: list[int], num_tokens: int | None = None) -> Step:
        self._step += 1
        content = self.names(end if num_tokens is None else num_tokens)
        held = self.engine.lookup(content, pin=True)
        load = Load(
            request_id="r",
            content=content,
            first=first,
            end=end,
            block_ids=[blocks],
            lookup_ids=([held.lookup_id],),
        )
        step = Step(loads=[load], number=self._step)
        self.side.load(step)
        return step

    def held(self, num_tokens: int) -> int:
        return self.engine.lookup(self.names(num_tokens)).num_tokens


@pytest.fixture
def worker() -> Iterator[Worker]:
    config = {"chunk_tokens": CHUNK, "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "8MiB"}]}
    model = ModelRecord(weights="w", config={}, chunk_tokens=CHUNK)
    with CacheEngine(config, model=model, part=PART) as engine:
        yield Worker(engine)


def test_blocks_come_back_in_other_blocks_byte_for_byte(worker: Worker) -> None:
    worker.save(80, [3, 4, 9, 1, 2])
    expected = [kv[[3, 4, 9, 1, 2]].clone() for kv in worker.kv]
    untouched = [kv[[18, 19]].clone() for kv in worker.kv]
    worker.load(0, 80, [10, 12, 11, 13, 14])
    for kv, was, others in zip(worker.kv, expected, untouched, strict=True):
        assert torch.equal(kv[[10, 12, 11, 13, 14]], was)
        assert torch.equal(kv[[18, 19]], others)
    report = worker.side.report()
    assert report is not None
    assert report.failed == {}
    assert worker.side.report() is None
    assert worker.side.failed_blocks() == set()
    assert not worker.engine._chain.pins.active()


def test_blocks_that_the_engine_has_itself_are_not_written(worker: Worker) -> None:
    worker.save(64, [1, 2, 3, 4])
    shared = [kv[[10, 11, 12]].clone() for kv in worker.kv]
    last = [kv[4].clone() for kv in worker.kv]
    worker.load(48, 64, [10, 11, 12, 13])
    for kv, was, end in zip(worker.kv, shared, last, strict=True):
        assert torch.equal(kv[[10, 11, 12]], was)
        assert torch.equal(kv[13], end)


def test_a_load_may_end_before_its_last_token(worker: Worker) -> None:
    worker.save(64, [1, 2, 3, 4])
    worker.load(0, 63, [10, 11, 12, 13], num_tokens=64)
    for kv in worker.kv:
        assert torch.equal(kv[10:14], kv[1:5])
    assert worker.lost == []


def test_what_is_gone_is_reported_from_its_first_block_on(worker: Worker) -> None:
    worker.save(32, [1, 2])
    step = worker.load(16, 96, [5, 6, 7, 8, 9, 10])
    assert worker.side.failed_blocks() == {7, 8, 9, 10}
    assert worker.side.failed_blocks() == set()
    report = worker.side.report()
    assert report is not None
    assert (report.step, report.failed) == (step.number, {"r": 32})
    assert worker.lost == [64]


def test_a_tier_that_raises_is_a_load_that_fails(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.save(64, [1, 2, 3, 4])

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(worker.engine, "retrieve", broken)
    worker.load(0, 64, [5, 6, 7, 8])
    assert worker.side.failed_blocks() == {5, 6, 7, 8}
    assert not worker.engine._chain.pins.active()
    monkeypatch.setattr(worker.engine, "store", broken)
    worker.save(96, [1, 2, 3, 4, 5, 6])


def test_nothing_computed_on_a_block_that_was_not_filled_is_kept_until_the_scheduler_knows(
    worker: Worker,
) -> None:
    failed = worker.load(0, 64, [5, 6, 7, 8])
    worker.save(64, [5, 6, 7, 8], confirmed=0)
    assert worker.held(64) == 0
    worker.save(64, [11, 12, 8, 13], confirmed=failed.number - 1, name="who shares a block")
    assert worker.held(64) == 0
    worker.save(64, [5, 6, 7, 8], confirmed=failed.number)
    assert worker.held(64) == 64


def test_a_step_waits_for_memory_once_however_much_it_has_to_save(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(content: NamedContent, source: object, *, mask: object) -> StoreResult:
        asked.append(content.num_tokens)
        return StoreResult(num_tokens=0, num_known_tokens=0, num_skipped_tokens=content.num_tokens)

    monkeypatch.setattr(worker.engine, "store", full)
    saves = [Save(request_id="r", content=worker.names(count), block_ids=[[1, 2]]) for count in (32, 64)]
    worker.side.save(Step(saves=saves, number=1))
    assert asked == [32]


def test_a_step_without_loads_is_reported_only_when_it_is_awaited(worker: Worker) -> None:
    worker.side.load(Step(number=1))
    assert worker.side.report() is None
    worker.side.load(Step(number=2, awaited=True))
    report = worker.side.report()
    assert report is not None
    assert (report.step, report.failed) == (2, {})
