"""One engine that only stores, and one that only loads what it stored; both guess tokens ahead (ngram)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, idle, tokens

PROMPTS = [Request(tokens(330 + 210 * i, seed=400 + i), max_tokens=40) for i in range(4)]
WHOLE = [len(prompt.tokens) // 128 * 128 for prompt in PROMPTS]
PATTERN = tokens(30, seed=410)
TALK = Request((PATTERN * 8)[:220], max_tokens=150)
"""Its answer completes a chunk while tokens are guessed, some rightly and some wrongly."""


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [said(plain.generate(request))[0] for request in (*PROMPTS, TALK)]


def guessing(model: Path, log: Path, folder: Path, role: str) -> Engine:
    cache = {
        "chunk_tokens": 256,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": str(folder)}},
        ],
    }
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return Engine(
        model,
        log,
        cache,
        transfer={"kv_role": role},
        speculative_config=guesses,
        disable_log_stats=False,
    )


@pytest.fixture(scope="module")
def folder(
    model: Path, log: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What an engine stored that never looks anything up."""
    folder = tmp_path_factory.mktemp("kv")
    with guessing(model, log, folder, "kv_producer") as producer:
        for _ in range(2):
            answers = producer.generate(*PROMPTS, TALK)
            assert said(answers) == expected
            assert cached(answers) == [0] * len(answers)
        seen = producer.ask("metrics")
        assert 0 < seen["vllm:spec_decode_num_accepted_tokens"] < seen["vllm:spec_decode_num_draft_tokens"]
        assert seen["vllm:external_prefix_cache_hits"] == 0
        assert seen["vllm:lmcache_core_stored_tokens"] > 0
        assert idle(producer)
    return folder


@pytest.fixture(scope="module")
def consumer(model: Path, log: Path, folder: Path) -> Iterator[Engine]:
    with guessing(model, log, folder, "kv_consumer") as engine:
        yield engine


def test_a_consumer_loads_what_a_producer_stored(consumer: Engine, expected: list[list[int]]) -> None:
    for _ in range(2):
        answers = consumer.generate(*PROMPTS)
        assert said(answers) == expected[:-1]
        assert cached(answers) == WHOLE
    assert idle(consumer)


def test_what_was_decoded_with_guesses_is_right(
    consumer: Engine, plain: Engine, expected: list[list[int]]
) -> None:
    turn = Request([*TALK.tokens, *expected[-1][:100]], max_tokens=40)
    [answer] = consumer.generate(turn)
    assert answer.cached == 256
    assert said([answer]) == said(plain.generate(turn))


def test_a_consumer_stores_nothing(consumer: Engine) -> None:
    new = Request(tokens(700, seed=420), max_tokens=2)
    assert cached([*consumer.generate(new), *consumer.generate(new)]) == [0, 0]
    assert consumer.ask("metrics")["vllm:lmcache_core_stored_tokens"] == 0
    assert idle(consumer)
