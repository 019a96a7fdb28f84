"""vLLM shares the blocks of a load before it is known to have succeeded: who may use them, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.lookups import Held
from lmcache_core.connectors.vllm.plan import Report
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.unconfirmed import PATIENCE_STEPS
from lmcache_core.identity import Content, ModelRecord

BLOCK = 128
BLOCK_IDS = ([*range(1, 9)],)


class Everything:
    """Caches that hold all that is asked for, in memory."""

    has_far_tiers = False
    several_ranks = False

    def __init__(self) -> None:
        self.model = ModelRecord(weights="w", config={}, chunk_tokens=256)
        self.mediums = {"cpu": "memory"}

    def hold(self, content: Content, limit: int) -> Held:
        return Held(min(content.num_tokens, limit) // BLOCK * BLOCK, (["pins"],))

    def release(self, held: Held) -> None:
        """Nothing is pinned."""

    def bring_near(self, content: Content) -> Any:
        raise AssertionError("everything is near")

    def close(self) -> None:
        """Nothing is open."""


def request(name: str, tokens: Sequence[int]) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        pooling_params=None,
        block_hashes=[tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)],
    )


SHARED = [*range(3, 3 + 4 * BLOCK)]
FIRST = request("first", [*SHARED, *range(600, 700)])
SECOND = request("second", [*SHARED, *range(700, 800)])
OTHER = request("other", [*range(900, 1500)])


def scheduler(groups: Sequence[Group] = (Group(BLOCK),)) -> SchedulerSide:
    return SchedulerSide(
        Everything(),
        groups,
        num_blocks=100,
        loads=True,
        saves=True,
        tails=True,
        prefetch_deadline_s=2.0,
        prefetches=1,
        pin_ttl_s=60.0,
    )


@pytest.fixture
def side() -> SchedulerSide:
    """The first request loads from its second block on, in step 1."""
    side = scheduler()
    assert side.matched(FIRST, BLOCK) == (3 * BLOCK, False)
    side.allocated(FIRST, BLOCK_IDS, 3 * BLOCK)
    return side


@pytest.mark.parametrize("later", [False, True], ids=["in the same step", "in a later one"])
def test_a_request_that_shares_a_load_waits_for_its_report(side: SchedulerSide, later: bool) -> None:
    if later:
        assert side.step().number == 1
    assert side.matched(SECOND, 4 * BLOCK) == (None, False)
    assert side.matched(SECOND, 2 * BLOCK) == (None, False)
    side.step()
    side.reported(Report(step=1, failed={}))
    assert side.matched(SECOND, 4 * BLOCK) == (0, False)


def test_it_also_waits_when_the_request_that_loads_is_gone(side: SchedulerSide) -> None:
    side.step()
    side.finished("first")
    assert side.matched(SECOND, 4 * BLOCK) == (None, False)


def test_requests_that_share_nothing_of_a_load_do_not_wait(side: SchedulerSide) -> None:
    assert side.matched(SECOND, BLOCK) == (3 * BLOCK, False)
    assert side.matched(OTHER, 4 * BLOCK) == (0, False)
    assert side.matched(OTHER, 0) == (4 * BLOCK, False)


def test_nobody_waits_for_a_report_for_ever(side: SchedulerSide) -> None:
    for _ in range(PATIENCE_STEPS):
        side.step()
        assert side.matched(SECOND, 4 * BLOCK) == (None, False)
    side.step()
    assert side.matched(SECOND, 4 * BLOCK) == (0, False)


def test_where_requests_wait_for_their_loads_nothing_is_shared_before() -> None:
    side = scheduler([Group(BLOCK), Group(BLOCK, window=200)])
    assert side.matched(FIRST, BLOCK) == (3 * BLOCK, True)
    side.allocated(FIRST, BLOCK_IDS * 2, 3 * BLOCK)
    assert side.matched(SECOND, 4 * BLOCK) == (0, False)
