"""vLLM: the scheduler's side by itself, with a real cache engine: what is looked up and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_one_group import (
    CHUNK,
    PROMPT,
    Blocks,
    Clock,
    Far,
    alone,
    keep,
    num_pins,
    one_engine,
    planned,
    request,
    side_of,
)

from lmcache_core.connectors.vllm.lookups import Held, LocalLookups
from lmcache_core.connectors.vllm.plan import Report
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.engine import CacheEngine
from lmcache_core.identity import Content


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    with one_engine() as engine:
        yield engine


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(engine: CacheEngine, clock: Clock) -> Callable[..., SchedulerSide]:
    def make(lookups: Any = None, **changes: Any) -> SchedulerSide:
        return side_of(lookups or LocalLookups(alone(engine)), clock=clock, **changes)

    return make


def test_a_hit_is_pinned_until_it_is_loaded(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:640])
    side = make()
    assert side.matched(request(), 0) == (640, False)
    assert side.matched(request(), 0) == (640, False)
    assert num_pins(engine) == 1
    side.allocated(request(), ([7, 8, 9, 10, 11, 12],), 640)
    [load] = planned(side).loads
    assert (load.first, load.end, load.content.num_tokens) == (0, 640, 640)
    engine.lookup_unpin(load.lookup_ids[0][0])
    side.finished("r")
    assert num_pins(engine) == 0


def test_a_question_that_is_repeated_hashes_and_looks_up_once(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    asked: list[int] = []

    class Counted(LocalLookups):
        def hold(self, content: Content, limit: int) -> Any:
            asked.append(limit)
            return super().hold(content, limit)

    side, each = make(Counted(alone(engine))), request()
    answers = {side.matched(each, 0) for _ in range(1000)}
    assert answers == {(512, False)}
    assert len(asked) <= 2, "one question, and one after a wait that brought nothing"


def test_what_the_engine_has_is_not_loaded_again(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:640])
    side = make()
    assert side.matched(request(), 384) == (256, False)
    side.allocated(request(), ([1, 2, 3, 4, 5, 6],), 256)
    assert [(load.first, load.end) for load in planned(side).loads] == [(384, 640)]
    side.reported(Report(step=1, failed={}))
    assert side.matched(request(name="other"), 640) == (0, False)


def test_what_the_engine_has_need_not_be_in_any_tier(make: Any, engine: CacheEngine) -> None:
    engine.store(engine.content(PROMPT[:640]), Blocks(), mask=[False] * 512 + [True] * 128)
    side = make()
    assert side.matched(request(name="other"), 0) == (0, False)
    assert side.matched(request(), 512) == (128, False)
    side.allocated(request(), ([1, 2, 3, 4, 5, 6],), 128)
    [load] = planned(side).loads
    assert (load.first, load.end, load.content.num_tokens) == (512, 640, 640)


def test_for_a_request_that_reads_no_cache_nothing_is_pinned_or_brought_near(
    make: Any, engine: CacheEngine
) -> None:
    keep(engine, PROMPT[:512])
    far = Far(engine)
    side = make(far)
    assert side.matched(request(skip_reading_prefix_cache=True), 0) == (0, False)
    assert not far.asked
    assert engine.stats().memory.leases == 0
    assert planned(side, r=700).saves


def test_what_the_engine_has_is_not_brought_near(make: Any, engine: CacheEngine) -> None:
    far = Far(engine)
    assert make(far).matched(request(), 384) == (None, False)
    [asked] = far.asked
    content = engine.content(PROMPT)
    assert asked.hashes == content.hashes[1:]
    assert asked.tail_hashes_after(1) == content.tail_hashes_after(2)
    assert asked.num_tokens == len(PROMPT) - CHUNK


def test_what_the_engine_loses_meanwhile_is_looked_for_again(make: Any, engine: CacheEngine) -> None:
    engine.store(engine.content(PROMPT[:512]), Blocks(), mask=[False] * 256 + [True] * 256)
    far = Far(engine)
    side, each = make(far, prefetches=2), request()
    assert side.matched(each, 256) == (None, False)
    assert side.matched(each, 0) == (None, False)
    assert [asked.num_chunks for asked in far.asked] == [1, 2]
    assert [arrival.cancelled for arrival in far.arrivals] == [True, False]
    side.finished("r")
    assert num_pins(engine) == 0


def test_one_token_is_left_to_compute(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    assert make().matched(request(PROMPT[:512]), 0) == (511, False)


def test_a_request_waits_for_slower_tiers_no_longer_than_its_deadline(
    make: Any, engine: CacheEngine, clock: Clock
) -> None:
    keep(engine, PROMPT[:256])
    far = Far(engine)
    side, each = make(far), request()
    assert side.matched(each, 0) == (None, False)
    assert side.matched(each, 0) == (None, False)
    clock.now = 1.9
    assert side.matched(each, 0) == (None, False)
    clock.now = 2.1
    assert side.matched(each, 0) == (256, False)
    assert side.matched(each, 0) == (256, False)
    assert [arrival.cancelled for arrival in far.arrivals] == [True]


def test_a_request_that_finds_no_room_to_prefetch_waits_no_longer(
    make: Any, engine: CacheEngine, clock: Clock
) -> None:
    far = Far(engine)
    side = make(far)
    assert side.matched(request(), 0) == (None, False)
    assert side.matched(request(name="second"), 0) == (None, False)
    assert len(far.arrivals) == 1
    clock.now = 2.1
    assert side.matched(request(name="second"), 0) == (0, False)


def test_what_failed_once_is_not_offered_to_the_request_again(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:640])
    side = make()
    side.matched(request(), 0)
    side.allocated(request(), ([1, 2, 3, 4, 5, 6],), 640)
    step = planned(side)
    engine.lookup_unpin(step.loads[0].lookup_ids[0][0])
    side.reported(Report(step=step.number, failed={"r": 256}))
    assert side.matched(request(), 0) == (256, False)
    side.allocated(request(), ([1, 2, 3, 4, 5, 6],), 256)
    again = planned(side)
    assert again.confirmed == step.number
    assert again.loads[0].content.num_tokens == 256, "not what failed before"
    engine.lookup_unpin(again.loads[0].lookup_ids[0][0])
    assert side.matched(request(name="another"), 0) == (640, False)


def test_what_vllm_does_not_take_is_let_go(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    side = make()
    side.matched(request(), 0)
    side.allocated(request(), ([],), 0)
    assert num_pins(engine) == 0
    assert planned(side).loads == []


def test_what_is_offered_is_looked_up_and_pinned_anew_after_half_of_its_pins_life(
    make: Any, engine: CacheEngine, clock: Clock
) -> None:
    class Counted(LocalLookups):
        num_lookups = 0

        def hold(self, content: Content, limit: int) -> Held:
            self.num_lookups += 1
            return super().hold(content, limit)

    keep(engine, PROMPT[:640])
    lookups = Counted(alone(engine))
    side = make(lookups, pin_ttl_s=60.0)
    seen = []
    for clock.now in (0.0, 29.9, 30.0, 59.9, 60.0):
        assert side.matched(request(), 0) == (640, False)
        seen.append((lookups.num_lookups, num_pins(engine)))
    assert seen == [(1, 1), (1, 1), (2, 1), (2, 1), (3, 1)]
    side.finished("r")
    assert num_pins(engine) == 0


def test_an_aborted_request_leaves_nothing(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    far = Far(engine)
    side = make(far)
    side.matched(request(), 0)
    side.finished("r")
    assert num_pins(engine) == 0
    assert far.arrivals[0].cancelled


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    consumer, producer = make(saves=False), make(loads=False)
    assert producer.matched(request(), 0) == (0, False)
    assert [save.content.num_tokens for save in planned(producer, r=700).saves] == [640]
    assert consumer.matched(request(), 0) == (512, False)
    assert planned(consumer, r=700).saves == []


@pytest.mark.parametrize(
    "left_out",
    [
        {"prompt_embeds": object()},
        {"resumable": True},
        {"pooling_params": object()},
        {"lora_request": SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="/nowhere")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_that_cannot_be_named_is_left_out(make: Any, engine: CacheEngine, left_out: Any) -> None:
    keep(engine, PROMPT[:512])
    side = make()
    assert side.matched(request(**left_out), 0) == (0, False)
    assert planned(side, r=700).saves == []


def test_an_image_salt_or_adapter_is_part_of_the_name(make: Any, engine: CacheEngine, tmp_path: Path) -> None:
    keep(engine, PROMPT[:512])
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    image = SimpleNamespace(identifier="an image", mm_position=SimpleNamespace(offset=600, length=20))
    adapter = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path=str(tmp_path))
    side = make()
    assert side.matched(request(name="a", cache_salt="s"), 0) == (0, False)
    assert side.matched(request(name="b", lora_request=adapter), 0) == (0, False)
    assert side.matched(request(name="c", mm_features=[image]), 0) == (512, False)
    image.mm_position.offset = 300
    assert side.matched(request(name="d", mm_features=[image]), 0) == (256, False)


def test_an_adapter_whose_files_change_is_left_out_from_then_on(make: Any, tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    adapter = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path=str(tmp_path))
    side = make()
    assert side.contents.of(request(lora_request=adapter)) is not None
    before = side.contents.of(request(lora_request=adapter))
    weights.write_bytes(b"other weights")
    assert side.contents.of(request(lora_request=adapter)) is None, "vLLM may hold either"
    after = make().contents.of(request(lora_request=adapter))
    for content in (before, after):
        side.contents.grow(content, request(), 512)
    assert before.hashes != after.hashes


def test_a_new_epoch_shares_nothing_with_what_was_before(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    side = make()
    assert side.matched(request(), 0) == (512, False)
    side.forget(b"epoch", engine_forgot=True)
    assert num_pins(engine) == 0
    assert planned(side, r=700).saves == [], "computed with the weights of before"
    assert side.matched(request(), 0) == (0, False)
