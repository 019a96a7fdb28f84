"""Whatever a tier does, and however little memory vLLM has: every request ends, with the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, tokens

SHARED = tokens(1024, seed=7)
REQUESTS = [
    Request([*SHARED[: 256 * (i % 5)], *tokens(150 + 61 * i, seed=70 + i)], max_tokens=40) for i in range(12)
]
BLOCK_NBYTES = 3 * 2 * 128 * 2 * 32 * 4
"""Layers x KV heads x tokens x (K and V) x dim x float32."""


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [said(plain.generate(request))[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def engine(model: Path, log: Path) -> Iterator[Engine]:
    """Little memory for KV, so that running requests are preempted, and a tier that obeys the test."""
    cache = {
        "chunk_tokens": 256,
        "memory": {"staging": "32MiB"},
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "32MiB"},
            {
                "name": "far",
                "backend": "faulty",
                "capacity": "48MiB",
                "deadline": "400ms",
                "breaker": {"failures": 1000},
            },
        ],
    }
    with Engine(
        model,
        log,
        cache,
        settings={"prefetch_deadline": "1s"},
        kv_cache_memory_bytes=26 * BLOCK_NBYTES,
        max_model_len=2048,
        enable_prefix_caching=True,
    ) as engine:
        yield engine


def idle(engine: Engine) -> bool:
    seen = engine.ask("stats")
    return (seen["leases"], seen["pins"], seen["tracked"]) == (0, 0, 0)


def test_preempted_requests_answer_as_others(engine: Engine, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert said(engine.generate(*REQUESTS)) == expected
    assert engine.ask("preemptions") > 0, "nothing was preempted: this test needs less KV memory"
    assert idle(engine)


def test_a_tier_that_fails_one_get_in_five(engine: Engine, expected: list[list[int]]) -> None:
    engine.ask("fail_gets", 5)
    for _ in range(2):
        engine.ask("clear", "cpu")
        assert said(engine.generate(*REQUESTS)) == expected
    engine.ask("fail_gets", 0)
    assert idle(engine)


def test_what_was_promised_and_is_gone_is_computed(engine: Engine, expected: list[list[int]]) -> None:
    assert said(engine.generate(*REQUESTS)) == expected
    engine.ask("lose_promises", True)
    assert said(engine.generate(*REQUESTS)) == expected
    assert engine.ask("lost_promises") > 0, "nothing was promised"
    engine.ask("lose_promises", False)
    assert said(engine.generate(*REQUESTS)) == expected
    assert idle(engine)


def test_what_was_computed_on_a_lost_promise_is_not_kept(engine: Engine, plain: Engine) -> None:
    """The first forward after it reads blocks that were never filled; only the second one is right."""
    longer = [Request([*SHARED, *tokens(300 + 50 * i, seed=90 + i)], max_tokens=40) for i in range(3)]
    expected = [said(plain.generate(request))[0] for request in longer]
    others = [Request(tokens(1500, seed=95 + i)) for i in range(2)]
    for request, tokens_expected in zip(longer, expected, strict=True):
        engine.generate(*others)  # so that no block holds by chance what it should
        engine.ask("lose_promises", True)
        assert engine.generate(request)[0].tokens == tokens_expected
        engine.ask("lose_promises", False)
        engine.ask("reset_vllm")
        [again] = engine.generate(request)
        assert again.tokens == tokens_expected
        assert again.cached >= len(SHARED)
    assert idle(engine)


def test_a_tier_that_hangs_costs_no_more_than_its_deadline(engine: Engine, expected: list[list[int]]) -> None:
    engine.ask("clear", "cpu")
    engine.ask("hang_gets", True)
    assert said(engine.generate(*REQUESTS)) == expected
    engine.ask("hang_gets", False)
    assert said(engine.generate(*REQUESTS)) == expected
    assert idle(engine)


def test_many_requests_leave_nothing_behind(model: Path, log: Path, tmp_path: Path) -> None:
    disk = {"name": "disk", "backend": "disk", "capacity": "48MiB", "options": {"path": str(tmp_path)}}
    cache = {
        "memory": {"staging": "32MiB"},
        "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "32MiB"}, disk],
    }
    resident = []
    little = {"kv_cache_memory_bytes": 26 * BLOCK_NBYTES, "max_model_len": 2048}  # all touched at once
    with Engine(model, log, cache, **little) as engine:
        for batch in range(6):
            engine.generate(
                *(
                    Request([*SHARED[: 256 * (i % 3)], *tokens(20 + i, seed=1000 * batch + i)], max_tokens=2)
                    for i in range(200)
                )
            )
            assert idle(engine)
            resident.append(engine.ask("stats")["resident_bytes"] >> 20)
    assert resident[-1] - resident[2] < 16, f"MiB after each batch of 200 requests: {resident}"
