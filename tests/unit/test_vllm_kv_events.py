"""vLLM: which of its blocks are told of, when, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.connectors.vllm import kv_events
from lmcache_core.connectors.vllm.kv_events import BlockEvents, News, RankNews, Told
from lmcache_core.events import ChunkAdmitted, ChunkEvicted
from lmcache_core.identity import Content, ModelRecord, Part, chunk_key, record_key

BLOCK, CHUNK = 32, 64
MODEL = ModelRecord(weights="w", config={}, chunk_tokens=CHUNK)
PART = Part(layers=(0, 1), heads=(0, 1), content_format="test", content_nbytes=8)
PROMPT = list(range(3, 3 + 2 * CHUNK + BLOCK + 5))
"""Two chunks of two blocks, a tail of one, and a little more."""
HASHES = [bytes([i]) * 32 for i in range(5)]


def request(tokens: list[int] = PROMPT, **changes: Any) -> Any:
    fields = {
        "all_token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "block_hashes": HASHES[: len(tokens) // BLOCK],
        "cache_salt": None,
        "lora_request": None,
    }
    return SimpleNamespace(**(fields | changes))


def events_of(num_holders: int = 1, hash_tokens: int = BLOCK) -> BlockEvents:
    return BlockEvents(
        block_tokens=BLOCK,
        hash_tokens=hash_tokens,
        num_holders=num_holders,
        extra_keys=lambda request, first, end: ("image",) if first <= 40 < end else None,
    )


def known(events: BlockEvents, asked: Any = None) -> list[str]:
    """Makes a request known; returns its chunks, and its prompt's tail."""
    asked = asked or request()
    content = Content(MODEL)
    content.extend(asked.all_token_ids)
    events.grown(asked, content, 0)
    [tail] = [digest for count, digest in content.tail_hashes_after(content.num_chunks) if count == BLOCK]
    return [digest.hex() for digest in (*content.hashes, tail)]


def news(chunk: str, here: bool = True, *, tier: str = "cpu", rank: int = 0, part: str = "p") -> News:
    return News(rank, part, tier, chunk, here)


def summary(told: list[Told]) -> list[tuple[bool, str, list[bytes]]]:
    return [(each.stored, each.tier, list(each.blocks)) for each in told]


def test_blocks_are_told_of_with_their_tokens_and_parents() -> None:
    events = events_of()
    first, second, tail = known(events, request(lora_request=SimpleNamespace(adapter_id=7, name="fine")))
    events.heard([news(tail), news(first), news(second)])
    told = events.take()
    assert [list(each.blocks) for each in told] == [HASHES[0:2], HASHES[2:4], HASHES[4:5]], "parents first"
    assert [each.parent for each in told] == [None, HASHES[1], HASHES[3]]
    assert [list(each.tokens) for each in told] == [PROMPT[:64], PROMPT[64:128], PROMPT[128:160]]
    assert [list(each.extra_keys) for each in told] == [[None, ("image",)], [None, None], [None]]
    assert {each.lora for each in told} == {(7, "fine")}
    assert events.take() == []


def test_a_block_leaves_with_the_last_that_holds_it() -> None:
    """A prompt's tail may lie beside a longer chunk of the same place."""
    events = events_of()
    shorter = known(events, request(PROMPT[: CHUNK + BLOCK]))[1]
    second = known(events)[1]
    events.heard([news(shorter)])
    assert summary(events.take()) == [(True, "cpu", HASHES[2:3])]
    events.heard([news(second)])
    [told] = events.take()
    assert (list(told.blocks), told.parent, list(told.tokens)) == (HASHES[3:4], HASHES[2], PROMPT[96:128])
    events.heard([news(shorter, False)])
    assert events.take() == []
    events.heard([news(second, False)])
    assert summary(events.take()) == [(False, "cpu", HASHES[2:4])]


def test_tiers_are_told_apart() -> None:
    events = events_of()
    chunk = known(events)[0]
    events.heard([news(chunk), news(chunk, tier="disk"), news(chunk, False)])
    assert summary(events.take()) == [
        (True, "cpu", HASHES[:2]),
        (True, "disk", HASHES[:2]),
        (False, "cpu", HASHES[:2]),
    ]


def test_what_ranks_and_parts_hold_is_told_once_when_all_do_and_gone_when_one_does_not() -> None:
    events = events_of(num_holders=4)
    chunk = known(events)[0]
    holders = [(rank, part) for rank in range(2) for part in "pq"]
    for rank, part in holders[:3]:
        events.heard([news(chunk, rank=rank, part=part), news(chunk, rank=rank, part=part)])
        assert events.take() == []
    events.heard([news(chunk, rank=1, part="q")])
    assert summary(events.take()) == [(True, "cpu", HASHES[:2])]
    events.heard([news(chunk, False, rank=rank, part=part) for rank, part in holders])
    assert summary(events.take()) == [(False, "cpu", HASHES[:2])]


def test_blocks_of_several_hashes_are_known_by_their_last() -> None:
    events = events_of(hash_tokens=BLOCK // 2)
    halves = [bytes([i]) * 32 for i in range(10)]
    first, second, _ = known(events, request(block_hashes=halves))
    events.heard([news(second), news(first)])
    told = events.take()
    assert [list(each.blocks) for each in told] == [[halves[1], halves[3]], [halves[5], halves[7]]]
    assert told[1].parent == halves[3]


def test_a_request_with_a_salt_is_left_out() -> None:
    events = events_of()
    events.heard([news(chunk) for chunk in known(events, request(cache_salt="a secret"))])
    assert events.take() == []


def test_chunks_of_nobody_s_request_or_without_vllm_s_hashes_are_left_out() -> None:
    events = events_of()
    unhashed = known(events, request(block_hashes=HASHES[:3]))
    events.heard([news("00" * 32), *map(news, unhashed), news("00" * 32, False)])
    assert summary(events.take()) == [(True, "cpu", HASHES[:2])]


def test_what_is_forgotten_is_taken_back() -> None:
    events = events_of()
    chunks = known(events)
    events.heard([news(chunk) for chunk in chunks[:2]])
    events.take()
    events.forget()
    assert summary(events.take()) == [(False, "cpu", HASHES[2:4]), (False, "cpu", HASHES[:2])]
    events.heard([news(chunk, False) for chunk in chunks])
    assert events.take() == []


def test_memory_is_bounded_and_what_falls_out_of_it_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_TOKENS", 2 * CHUNK)
    events = events_of()
    first = known(events, request(PROMPT[: CHUNK + BLOCK]))[0]  # and a tail
    events.heard([news(first)])
    events.take()
    other = [token + 500 for token in PROMPT[: CHUNK + BLOCK]]
    known(events, request(other, block_hashes=[b"x" * 32] * 3))
    assert summary(events.take()) == [(False, "cpu", HASHES[:2])]
    assert events._num_tokens <= 2 * CHUNK


def test_a_rank_reports_chunks_of_its_parts_in_order() -> None:
    heard, digest = RankNews(3, [PART.digest]), b"h" * 32
    key = chunk_key(PART.digest, digest)
    for event in (
        ChunkAdmitted(tier="cpu", key=key, nbytes=1, sequence=1),
        ChunkAdmitted(tier="cpu", key=record_key(digest), nbytes=1, sequence=2),
        ChunkAdmitted(tier="cpu", key=chunk_key("0" * 16, digest), nbytes=1, sequence=3),
        ChunkEvicted(tier="cpu", key=key, nbytes=1, sequence=4, reason="capacity"),
    ):
        heard.on_event(event)
    assert heard.take() == [
        News(3, PART.digest, "cpu", digest.hex(), True),
        News(3, PART.digest, "cpu", digest.hex(), False),
    ]
    assert heard.take() == []
