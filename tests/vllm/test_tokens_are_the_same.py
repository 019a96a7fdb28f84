"""Greedy float32 tokens of the real vLLM: the same without a connector, cold, and from every tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, flip, tokens

SHARED = tokens(1024, seed=1)
LONG = [Request([*SHARED[: 256 * (i % 5)], *tokens(700 + 61 * i, seed=20 + i)]) for i in range(8)]
SHORT = [Request([*SHARED[: 64 * (i % 5)], *tokens(20 + 9 * i, seed=40 + i)]) for i in range(24)]
MIXED = [request for i, long in enumerate(LONG) for request in (long, *SHORT[3 * i : 3 * i + 3])]
WHOLE = Request(SHARED)
"""Exactly four chunks: nothing but the last token is left to compute."""
TALK = Request(tokens(200, seed=3), max_tokens=120)
"""Its answer completes a chunk while it is being decoded."""


def cache(folder: Path) -> dict[str, object]:
    return {
        "chunk_tokens": 256,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "256MiB"},
            {"name": "disk", "backend": "disk", "capacity": "512MiB", "options": {"path": str(folder)}},
        ],
    }


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    """Each request's tokens, computed alone."""
    return [said(plain.generate(request))[0] for request in (*MIXED, WHOLE, TALK)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def first(model: Path, log: Path, folder: Path) -> Iterator[Engine]:
    # Few tokens a step: every long prompt is computed in pieces, beside requests that decode.
    with Engine(model, log, cache(folder), max_num_batched_tokens=384, max_num_seqs=12) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm(first: Engine, expected: list[list[int]]) -> list[Answer]:
    """Answers to requests that were all seen before."""
    cold = first.generate(*MIXED, WHOLE, TALK)
    assert said(cold) == expected
    return first.generate(*MIXED, WHOLE, TALK)


def test_what_is_loaded_from_memory_answers_as_what_is_computed(
    warm: list[Answer], expected: list[list[int]]
) -> None:
    assert said(warm) == expected


def test_a_prompt_is_loaded_up_to_its_last_whole_block(warm: list[Answer]) -> None:
    for request, answer in zip(MIXED, warm, strict=False):
        whole = len(request.tokens) // 128 * 128
        assert answer.cached == min(whole, len(request.tokens) - 1)


def test_a_prompt_of_whole_chunks_computes_its_last_token_only(warm: list[Answer]) -> None:
    assert warm[len(MIXED)].cached == len(WHOLE.tokens) - 1


def test_the_next_turn_of_a_chat_finds_what_was_decoded(
    first: Engine, warm: list[Answer], plain: Engine
) -> None:
    turn = Request([*TALK.tokens, *warm[-1].tokens[:100]])
    [answer] = first.generate(turn)
    assert answer.cached == 256
    assert said([answer]) == said(plain.generate(turn))


def test_two_salts_share_nothing(first: Engine, warm: list[Answer], expected: list[list[int]]) -> None:
    mine, others = Request(LONG[4].tokens, salt="a tenant"), Request(LONG[4].tokens, salt="another")
    [answer] = first.generate(mine)
    assert (answer.cached, answer.tokens) == (0, expected[16])
    assert first.generate(mine)[0].cached == warm[16].cached
    assert first.generate(others)[0].cached == 0


def test_the_engine_holds_nothing_when_all_requests_are_answered(first: Engine, warm: list[Answer]) -> None:
    seen = first.ask("stats")
    assert (seen["leases"], seen["pins"]) == (0, 0)


def test_a_reset_forgets_everything(first: Engine, warm: list[Answer], expected: list[list[int]]) -> None:
    assert first.ask("reset")
    again = first.generate(WHOLE, LONG[0])
    assert [answer.cached for answer in again] == [0, 0]
    assert said(again) == [expected[len(MIXED)], expected[0]]
    assert first.generate(WHOLE)[0].cached == len(WHOLE.tokens) - 1


def test_a_new_process_loads_from_disk(
    first: Engine, warm: list[Answer], model: Path, log: Path, folder: Path, expected: list[list[int]]
) -> None:
    first.close()  # the last test that uses it
    with Engine(model, log, cache(folder)) as engine:
        answers = engine.generate(*MIXED, WHOLE, TALK)
        assert said(answers) == expected
        assert [answer.cached for answer in answers] == [answer.cached for answer in warm]
        engine.ask("clear", "cpu")
        for file in folder.rglob("*"):
            if file.stat().st_size > 64 << 10:
                flip(file)
        answers = engine.generate(*MIXED, WHOLE, TALK)
        assert said(answers) == expected
        seen = engine.ask("stats")
        assert seen["tiers"]["disk"]["rejected"] > 0
        assert (seen["leases"], seen["pins"]) == (0, 0)
