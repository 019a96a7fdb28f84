"""vLLM: the scheduler's side where requests wait for their loads, as with several attention groups."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_two_groups import PROMPT, Rank, two_groups

from lmcache_core.connectors.vllm.lookups import LocalLookups
from lmcache_core.connectors.vllm.plan import Report, Step
from lmcache_core.connectors.vllm.scheduler import SchedulerSide


@pytest.fixture
def rank() -> Iterator[Rank]:
    with two_groups() as rank:
        yield rank


class Both(LocalLookups):
    """As if it were two ranks."""

    several_ranks = True


def scheduler(rank: Rank, num_blocks: int = 100) -> SchedulerSide:
    return SchedulerSide(
        Both(rank.cache),
        rank.cache.groups,
        num_blocks=num_blocks,
        loads=True,
        saves=True,
        tails=True,
        prefetch_deadline_s=1.0,
        prefetches=1,
        pin_ttl_s=60.0,
    )


def request(name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=PROMPT,
        all_token_ids=PROMPT,
        num_tokens=len(PROMPT),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        pooling_params=None,
    )


def planned(side: SchedulerSide, **num_scheduled: int) -> Step:
    step = side.step()
    tables = SimpleNamespace(get_block_ids=lambda name: ([1, 2, 3], [0, 5, 6]))
    side.plan_saves(
        step, SimpleNamespace(num_scheduled_tokens=num_scheduled, kv_connector_block_state=tables)
    )
    return step


def test_a_request_waits_for_its_load_and_starts_anew_where_it_failed(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320)
    side, each = scheduler(rank), request()
    assert side.matched(each, 64) == (256, True)
    tables = (list(range(1, 21)), [0] * 17 + [18, 19, 20])
    side.allocated(each, tables, 256)
    step = planned(side)
    [load] = step.loads
    assert (load.first, load.end, load.block_ids) == (64, 320, tables)
    rank.side.load(step)
    assert planned(side, another=1).saves == []
    side.reported(Report(step=step.number, failed={"r": 192}))
    assert side.matched(each, 0) == (0, False), "vLLM would count the blocks of a second load twice"
    assert side.matched(request("another"), 0) == (320, True)
    side.finished("r")
    side.finished("another")
    assert rank.pins() == 0


@pytest.mark.parametrize("end", ["computed", "gone"])
def test_no_more_requests_wait_than_fit_when_all_are_taken_back(rank: Rank, end: str) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320)
    side = scheduler(rank, num_blocks=2 * (21 + 1) * 2 - 1)
    first, second = request("first"), request("second")
    assert side.matched(first, 0) == (320, True)
    side.allocated(first, (list(range(1, 21)), [0] * 17 + [18, 19, 20]), 320)
    assert side.matched(second, 0) == (None, False)
    rank.side.load(planned(side))
    assert side.matched(second, 0) == (None, False)
    if end == "gone":
        side.finished("first")
    else:
        side.allocated(first, (list(range(1, 22)), [0] * 17 + [18, 19, 20, 21]), 0)
    assert side.matched(second, 0) == (320, True)
    side.finished("second")
    assert rank.pins() == 0


def test_nothing_waits_to_be_saved_for_a_load_that_nobody_computes_behind(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320)
    side, waiting, other = scheduler(rank), request(), request("other")
    other.cache_salt = "salt"
    side.matched(waiting, 0)
    side.matched(other, 0)
    side.allocated(waiting, (list(range(1, 21)), [0] * 17 + [18, 19, 20]), 320)
    [save] = planned(side, other=130).saves
    assert (save.request_id, save.content.num_tokens) == ("other", 128)
    assert save.block_ids == ([1, 2, 3], [0, 5, 6])


def test_requests_that_wait_over_a_reset_are_still_counted(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320)
    side = scheduler(rank, num_blocks=2 * (21 + 1) * 2 - 1)
    first, second = request("first"), request("second")
    assert side.matched(first, 0) == (320, True)
    side.allocated(first, (list(range(1, 21)), [0] * 17 + [18, 19, 20]), 320)
    rank.side.load(planned(side))
    side.forget(b"", engine_forgot=False)  # the same epoch, so that there is something to find
    assert side.matched(second, 0) == (None, False)
    side.finished("first")
    assert side.matched(second, 0) == (320, True)
    side.finished("second")
    assert rank.pins() == 0
