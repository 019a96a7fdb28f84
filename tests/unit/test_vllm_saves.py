"""vLLM: the scheduler's side by itself, with a real cache engine: what is saved, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_one_group import (
    PROMPT,
    alone,
    keep,
    one_engine,
    planned,
    request,
    saved,
    side_of,
)

from lmcache_core.connectors.vllm.lookups import LocalLookups
from lmcache_core.connectors.vllm.plan import Report
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.engine import CacheEngine


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    with one_engine() as engine:
        yield engine


@pytest.fixture
def make(engine: CacheEngine) -> Callable[..., SchedulerSide]:
    def make(lookups: Any = None, **changes: Any) -> SchedulerSide:
        return side_of(lookups or LocalLookups(alone(engine)), **changes)

    return make


def test_whole_chunks_are_saved_as_they_are_complete_and_the_tail_with_the_prompt(make: Any) -> None:
    side, each = make(), request()
    side.matched(each, 0)
    seen = []
    for computed, scheduled in ((0, 300), (300, 100), (400, 300), (700, 1)):
        each.num_computed_tokens = computed
        seen.append(saved(planned(side, r=scheduled)))
    assert seen == [{"r": 256}, {}, {"r": 640}, {}]


def test_several_ranks_save_nothing_until_all_have_loaded_what_was_promised(
    make: Any, engine: CacheEngine
) -> None:
    keep(engine, PROMPT[:512])
    lookups = LocalLookups(alone(engine))
    lookups.several_ranks = True
    side, each = make(lookups), request()
    assert side.matched(each, 0) == (512, False)
    side.allocated(each, ([1, 2, 3, 4, 5, 6],), 512)
    each.num_computed_tokens = 512
    step = planned(side, r=188)
    assert (len(step.loads), step.saves) == (1, [])
    assert planned(side, r=188).saves == [], "a rank that loaded would keep what another computed on garbage"
    side.reported(Report(step=step.number, failed={"r": 256}))
    each.num_computed_tokens = 256
    assert [save.content.num_tokens for save in planned(side, r=444).saves] == [640]


def test_what_another_connector_loads_is_saved_once_vllm_has_dealt_with_its_failures(make: Any) -> None:
    """Beside ours in vLLM's MultiConnector: it can tell of a failure only when the step's KV is saved."""
    side, older, loading, with_it = make(), *(request(name=name) for name in ("older", "loading", "with_it"))
    side.matched(older, 0)
    side.allocated(older, ([1, 2, 3, 4, 5, 6],), 0)
    assert saved(planned(side, older=300)) == {"older": 256}
    for each, computed in ((loading, 512), (with_it, 0)):
        side.matched(each, 0)
        side.allocated(each, ([1, 2, 3, 4, 5, 6],), 0)
        each.num_computed_tokens = computed
    older.num_computed_tokens = 600
    step = planned(side, older=100, loading=188, with_it=400)
    assert step.awaited
    assert saved(step) == {"older": 512}, "nothing else was computed before"
    older.num_computed_tokens, with_it.num_computed_tokens = 700, 400
    between = planned(side, older=1, loading=1, with_it=100)
    assert (between.awaited, saved(between)) == (False, {})
    side.reported(Report(step=step.number, failed={}))
    loading.num_computed_tokens = 0  # it failed
    assert saved(planned(side, older=1, loading=600, with_it=150)) == {
        "older": 640,
        "loading": 512,
        "with_it": 512,
    }


@pytest.mark.parametrize("in_the_same_step", [False, True])
@pytest.mark.parametrize("left_out", [False, True])
def test_nobody_shares_another_connector_s_load_before_its_failures_are_known(
    make: Any, left_out: bool, in_the_same_step: bool
) -> None:
    side, loading, sharing = make(), request(name="loading", resumable=left_out), request(name="sharing")
    side.matched(loading, 128)
    side.allocated(loading, ([1, 2, 3, 4, 5, 6],), 0)
    loading.num_computed_tokens = 512
    if in_the_same_step:
        assert side.matched(sharing, 512) == (None, False)
        assert side.matched(sharing, 128) == (0, False)
    step = planned(side, loading=188)
    side.finished("loading")
    assert not side._known.keys() & {"loading"}
    assert side.matched(sharing, 512) == (None, False)
    side.reported(Report(step=step.number, failed={}))
    assert side.matched(sharing, 512) == (0, False)


def test_what_one_rank_loads_is_no_reason_to_wait(make: Any, engine: CacheEngine) -> None:
    keep(engine, PROMPT[:512])
    side, each = make(), request()
    assert side.matched(each, 128) == (384, False)
    side.allocated(each, ([1, 2, 3, 4, 5, 6],), 384)
    each.num_computed_tokens = 512
    step = planned(side, r=188)
    assert (step.awaited, saved(step)) == (False, {"r": 640})


def test_tokens_that_are_not_confirmed_are_not_saved(make: Any) -> None:
    side, each = make(), request(PROMPT[:250])
    side.matched(each, 0)
    assert planned(side, r=250 + 8).saves[0].content.num_tokens == 128  # 8 speculative tokens


def test_a_request_under_way_in_a_reset_is_saved_under_the_new_epoch_if_it_is_computed_anew(
    make: Any,
) -> None:
    side, each, other = make(), request(), request(name="other")
    side.matched(each, 0)
    side.allocated(each, ([1, 2, 3, 4, 5, 6],), 0)
    [before] = planned(side, r=300).saves
    side.forget(b"epoch", engine_forgot=True)
    each.num_computed_tokens = 300
    assert saved(planned(side, r=400)) == {}, "its beginning was computed with the weights of before"
    side.matched(each, 0)  # vLLM has preempted it
    side.allocated(each, ([1, 2, 3, 4, 5, 6],), 0)
    each.num_computed_tokens = 0
    [anew] = planned(side, r=300).saves
    side.matched(other, 0)
    [others] = planned(side, other=300).saves
    assert anew.content.hashes == others.content.hashes != before.content.hashes


def test_what_the_engine_keeps_over_a_reset_is_not_saved_until_one_that_it_follows(make: Any) -> None:
    """vLLM resets nothing of its own while a request has blocks, and shares it with requests to come."""
    side = make()
    side.forget(b"epoch", engine_forgot=False)
    begun = {"begins_with_it": 256, "begins_anew": 0}
    for name, num_local in begun.items():
        each = request(name=name)
        side.matched(each, num_local)
        side.allocated(each, ([1, 2, 3, 4, 5, 6],), 0)
        each.num_computed_tokens = num_local
    assert saved(planned(side, begins_with_it=444, begins_anew=700)) == {"begins_anew": 640}
    side.forget(b"another", engine_forgot=True)
    each = request()
    side.matched(each, 256)
    each.num_computed_tokens = 256
    assert saved(planned(side, r=444)) == {"r": 640}
