"""vLLM: several attention groups as one cache, over real engines that share their tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_two_groups import BLOCK, CHUNK, FULL, MODEL, WINDOW, Rank, Zeros, content, part, two_groups

from lmcache_core.connectors.vllm.blocks import RequestBlocks
from lmcache_core.connectors.vllm.grouped import common_end
from lmcache_core.connectors.vllm.groups import Group, common_block_tokens, requests_wait
from lmcache_core.connectors.vllm.plan import Load, Report, Step
from lmcache_core.engine import CacheEngine
from lmcache_core.identity import NamedContent

SLIDING = Group(BLOCK, window=WINDOW)


@pytest.fixture
def rank() -> Iterator[Rank]:
    with two_groups() as rank:
        yield rank


def test_a_window_needs_what_the_next_token_sees() -> None:
    assert FULL.first_needed(300) == 0
    assert SLIDING.first_needed(300) == 261
    assert SLIDING.first_needed(20) == 0


def test_a_hit_needs_what_its_last_token_sees_when_it_is_computed_again() -> None:
    exact = Group(BLOCK, window=CHUNK + 1)
    assert exact.first_needed(4 * CHUNK) == 3 * CHUNK
    assert exact.skipped(4 * CHUNK, CHUNK) == 2 * CHUNK
    assert exact.needed(content(), 4 * CHUNK).hashes == content().hashes[2:4]


def test_what_is_needed_at_a_tail_ends_with_the_tail() -> None:
    names = SLIDING.needed(content(), 4 * CHUNK + 32)
    assert names.hashes == content().hashes[3:4]
    assert names.tail_hashes_after(1) == NamedContent.of(content(), 4 * CHUNK + 32).tail_hashes_after(4)


def test_requests_wait_unless_all_layers_see_everything() -> None:
    assert not requests_wait([FULL])
    assert requests_wait([SLIDING])
    assert requests_wait([FULL, FULL])
    assert common_block_tokens([Group(32), Group(48)]) == 96


def test_of_a_window_only_the_end_of_a_hit_must_be_there(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320, skip=256)
    assert rank.hit() == 320


def test_a_hit_ends_where_every_group_can_serve_it(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 128)
    assert rank.hit() == 128
    rank.keep(1, 320, skip=192)
    assert rank.hit(limit=250) == 128, "192 tokens need the chunk that is missing"
    assert rank.hit() == 320


def test_a_tail_that_a_window_lacks_is_cut_off(rank: Rank) -> None:
    rank.keep(0, 304)
    rank.keep(1, 256)
    assert rank.hit() == 256
    rank.keep(1, 304, skip=256)
    assert rank.hit() == 304


def test_a_window_that_is_nowhere_makes_it_a_miss_after_a_few_lookups(rank: Rank) -> None:
    rank.keep(0, 320)
    assert rank.hit() == 0


def test_parts_that_end_differently_share_whole_chunks_only() -> None:
    assert common_end({272}, CHUNK) == 272
    assert common_end({272, 320}, CHUNK) == 256, "the part that has a chunk there has no tail"


def test_of_two_ranks_the_one_that_loaded_less_counts() -> None:
    one, other = Report(step=1, failed={"r": 64, "s": 0}), Report(step=1, failed={"r": 128, "t": 64})
    assert one.with_rank(other).failed == other.with_rank(one).failed == {"r": 64, "s": 0, "t": 64}


def test_what_a_longer_hit_would_have_needed_is_not_held() -> None:
    """The first of the two chunks that its window needs was there, and pinned by the first lookup."""
    with two_groups(window=100) as rank:
        rank.keep(0, 320)
        rank.keep(1, 256, skip=192)
        assert rank.hit() == 0


def test_a_hit_is_pinned_in_every_group(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320)
    num_tokens, ids = rank.cache.hold(content(), 1000)
    assert (num_tokens, rank.pins()) == (320, 2)
    rank.cache.release(ids)
    assert rank.pins() == 0


def test_a_prefetch_brings_of_a_window_only_what_the_hit_needs(tmp_path: Path) -> None:
    disk = {"name": "disk", "backend": "disk", "capacity": "8MiB", "options": {"path": str(tmp_path)}}
    tiers = [{"name": "cpu", "backend": "cpu", "capacity": "8MiB"}, disk]
    with CacheEngine({"chunk_tokens": CHUNK, "tiers": tiers}, model=MODEL, part=part("full")) as engine:
        rank = Rank(engine)
        rank.keep(0, 320)
        rank.keep(1, 320)
        engine.flush()
        for each in rank.cache.engines:
            each.clear(search_range=["cpu"])
        assert rank.hit() == 0
        rank.cache.bring_near(content()).wait(30)
        assert rank.hit() == 320
        near = [each.lookup(content(), search_range=["cpu"]).num_tokens for each in rank.cache.engines]
        assert near == [320, 0]


def test_a_window_s_blocks_come_back_where_it_reaches_and_nothing_else_is_touched(rank: Rank) -> None:
    full, window = list(range(1, 9)), [*range(11, 17), 9, 10]
    saved = [kv[[full, window][g]].clone() for g, layers in enumerate(rank.kv) for kv in layers]
    rank.save(128, full, window)
    expected = [kv.clone() for layers in rank.kv for kv in layers]
    assert rank.load(0, 128, list(range(20, 28)), [0, 0, 0, 0, 0, 25, 26, 27]) == ({"r"}, set())
    for kv, was, blocks in zip((kv for layers in rank.kv for kv in layers), expected, saved, strict=True):
        group = 0 if kv is rank.kv[0][0] or kv is rank.kv[0][1] else 1
        places = list(range(20, 28)) if group == 0 else [25, 26, 27]
        assert torch.equal(kv[places], blocks[-len(places) :])
        others = [i for i in range(40) if i not in places]
        assert torch.equal(kv[others], was[others])


def test_a_promise_whose_window_has_no_blocks_takes_the_request_back_and_names_no_block(rank: Rank) -> None:
    rank.save(128, list(range(1, 9)), list(range(1, 9)))
    assert rank.load(0, 128, list(range(20, 28)), [0, 0, 0, 0, 0, 0, 26, 27]) == ({"r"}, {"r"})
    assert rank.side.failed_blocks() == set()
    report = rank.side.report()
    assert report is not None
    assert report.failed == {"r": 0}
    assert rank.lost == [128]
    assert rank.side.arrived() == (set(), set())


def test_a_load_brings_what_its_own_end_needs_however_much_more_was_held(rank: Rank) -> None:
    rank.save(320, list(range(1, 21)), list(range(1, 21)))
    expected = rank.kv[1][0][[6, 7, 8]].clone()
    assert rank.load(0, 128, list(range(20, 28)), [0, 0, 0, 0, 0, 25, 26, 27]) == ({"r"}, set())
    assert torch.equal(rank.kv[1][0][[25, 26, 27]], expected)


def test_a_load_reads_of_a_window_only_what_its_end_needs(rank: Rank) -> None:
    rank.keep(0, 320)
    rank.keep(1, 320, skip=256)
    assert rank.load(0, 320, list(range(20, 40)), [0] * 17 + [37, 38, 39]) == ({"r"}, set())


def test_a_load_reads_nothing_that_the_engine_has(rank: Rank) -> None:
    rank.keep(0, 320, skip=128)
    rank.keep(1, 320, skip=256)
    load = Load(
        request_id="r",
        content=NamedContent.of(content(), 320),
        first=128,
        end=320,
        block_ids=[list(range(20, 40)), [0] * 17 + [37, 38, 39]],
        lookup_ids=[[]],
    )
    rank.side.load(Step(loads=[load], number=1))
    assert rank.side.arrived() == ({"r"}, set())


def test_one_group_that_lost_its_part_takes_the_request_back(rank: Rank) -> None:
    rank.save(320, list(range(1, 21)), list(range(1, 21)))
    num_tokens, ids = rank.cache.hold(content(), 1000)
    rank.cache.release(ids)
    load = Load(
        request_id="r",
        content=NamedContent.of(content(), num_tokens),
        first=0,
        end=num_tokens,
        block_ids=[list(range(20, 40)), [0] * 17 + [37, 38, 39]],
        lookup_ids=[[]],
    )
    rank.cache.engines[1].clear()
    rank.side.load(Step(loads=[load], number=1))
    assert rank.side.arrived() == ({"r"}, {"r"})


def test_a_chunk_that_the_window_has_left_in_part_is_stored_and_its_rest_is_zeros(rank: Rank) -> None:
    rank.save(128, list(range(1, 9)), [0, 0, 0, 0, 0, 6, 7, 8])
    assert rank.held(1, 64, 128) == 64
    assert rank.held(1, 0, 64) == 0

    class Read:
        def scatter(self, first_token: int, num_tokens: int, payload: Any) -> None:
            for segment in payload:
                assert not any(segment[: len(segment) // 4])
                assert any(segment[len(segment) // 4 :])

    mask = [False] * CHUNK + [True] * CHUNK
    assert rank.cache.engines[1].retrieve(content(128), Read(), mask=mask).num_tokens == CHUNK


def test_a_chunk_whose_end_has_lost_something_it_sees_is_not_stored(rank: Rank) -> None:
    rank.save(192, list(range(1, 13)), [0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12])
    assert rank.held(1, 64, 128) == 0
    assert rank.held(1, 128, 192) == 64
    assert rank.held(0, 0, 192) == 192


def test_a_chunk_is_not_stored_without_what_its_last_token_sees() -> None:
    """A hit may leave that token to compute: here what it sees begins a block earlier than for the next."""
    with two_groups(window=BLOCK + 1) as rank:
        rank.save(128, list(range(1, 9)), [0, 0, 0, 0, 0, 0, 0, 8])
        assert rank.held(1, 64, 128) == 0
        rank.save(128, list(range(1, 9)), [0, 0, 0, 0, 0, 0, 7, 8])
        assert rank.held(1, 64, 128) == 64


def test_what_is_gathered_of_null_blocks_is_zeros_whatever_memory_held(rank: Rank) -> None:
    """It is somebody else's KV: frames are memory that was used before."""
    payload = [memoryview(bytearray(b"\xff" * (4 * rank.blocks[1].block_nbytes))) for _ in range(2)]
    RequestBlocks(rank.blocks[1], BLOCK, [0, 0, 3, 4]).gather(0, CHUNK, payload)
    for segment in payload:
        null, real = segment[: len(segment) // 2], segment[len(segment) // 2 :]
        assert null == bytes(len(null))
        assert real != bytes(len(real))


def test_a_null_block_behind_others_is_never_read_or_written(rank: Rank) -> None:
    rank.save(128, list(range(1, 9)), [1, 2, 0, 4, 5, 6, 7, 8])
    assert rank.held(1, 64, 128) == 0


def test_parts_beside_each_other_share_their_tiers_and_nothing_else(rank: Rank) -> None:
    rank.keep(1, 320)
    full, window = rank.cache.engines
    assert full.lookup(content()).num_tokens == 0
    assert window.lookup(content()).num_tokens == 320
    assert full.stats().tiers[0].used_bytes == window.stats().tiers[0].used_bytes > 0
    full.clear()
    assert window.lookup(content()).num_tokens == 320
    full.close()
    assert window.store(content(), Zeros()).num_tokens == 0
    assert window.lookup(content()).num_tokens == 0
