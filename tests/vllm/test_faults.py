"""Whatever a tier does, and however little memory vLLM has: every request ends, with the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, idle, tokens

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
    """Little memory for KV, so that running requests are preempted, and a tier that obeys the test.

    Behind it there is one whose server doesn't run.
    """
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
            {"name": "gone", "backend": "redis", "options": {"url": f"unix://{log.parent}/no-server"}},
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


def test_preempted_requests_answer_as_others(engine: Engine, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert said(engine.generate(*REQUESTS)) == expected
    assert engine.ask("preemptions") > 0, "nothing was preempted: this test needs less KV memory"
    assert idle(engine)


def test_a_tier_without_its_server_is_done_without(engine: Engine, expected: list[list[int]]) -> None:
    assert said(engine.generate(*REQUESTS)) == expected
    states = {name: tier["state"] for name, tier in engine.ask("stats")["tiers"].items()}
    assert states == {"cpu": "up", "far": "up", "gone": "down"}


def test_a_tier_that_fails_one_get_in_five_at_random(engine: Engine, expected: list[list[int]]) -> None:
    engine.ask("fail_gets", 5)
    for _ in range(2):
        engine.ask("clear", "cpu")
        assert said(engine.generate(*REQUESTS)) == expected
    assert engine.ask("failed_gets") > 0
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
    engine.ask("hang", "get", True)
    assert said(engine.generate(*REQUESTS)) == expected
    engine.ask("hang", "get", False)
    assert said(engine.generate(*REQUESTS)) == expected
    assert idle(engine)


def test_a_tier_that_takes_nothing_in_time(engine: Engine, expected: list[list[int]]) -> None:
    engine.ask("reset")  # so that everything is stored again
    engine.ask("hang", "put", True)
    assert said(engine.generate(*REQUESTS)) == expected
    engine.ask("hang", "put", False)
    assert said(engine.generate(*REQUESTS)) == expected
    assert idle(engine)


@pytest.mark.parametrize("hanging", [False, True])
def test_aborted_requests_hold_nothing(engine: Engine, expected: list[list[int]], hanging: bool) -> None:
    """Before their first step, while KV is fetched for them, during prefill, and while they decode."""
    beginning = Request(SHARED[:512], max_tokens=1)
    assert said(engine.generate(*REQUESTS)) == expected
    for num_steps in (0, 1, 2, 3, 5, 8, 13, 21):
        engine.ask("clear", "cpu")
        assert (
            engine.generate(beginning)[0].reason == "length"
        )  # in memory, and pinned while the rest is awaited
        if hanging:
            engine.ask("hang", "get", True)
        left = engine.halfway(REQUESTS, num_steps, "abort")
        assert left["running"] == len(REQUESTS)
        if hanging:
            engine.ask("hang", "get", False)
        assert idle(engine)
    assert said(engine.generate(*REQUESTS)) == expected


def test_what_runs_during_a_reset_is_not_kept(engine: Engine, expected: list[list[int]]) -> None:
    assert said(engine.generate(*REQUESTS)) == expected
    for num_steps in (1, 4, 30):
        engine.ask("reset_vllm")
        left = engine.halfway(REQUESTS[-1:], num_steps, "reset")
        assert left == {"running": 1, "finished": expected[-1:]}
        engine.ask("reset_vllm")
        [anew] = engine.generate(REQUESTS[-1])
        assert (anew.cached, anew.tokens) == (0, expected[-1])
    assert idle(engine)


def test_what_vllm_keeps_itself_over_a_reset_is_not_stored(engine: Engine, expected: list[list[int]]) -> None:
    """It resets nothing of its own while a request runs: what was there before stays, and is shared."""
    engine.ask("reset")
    assert said(engine.generate(REQUESTS[-1])) == expected[-1:]
    assert engine.halfway(REQUESTS[:1], 1, "reset")["running"] == 1
    [shared] = engine.generate(REQUESTS[-1])
    assert shared.cached > 0
    engine.ask("reset_vllm")
    [anew] = engine.generate(REQUESTS[-1])
    assert (anew.cached, anew.tokens) == (0, expected[-1])
    engine.ask("reset_vllm")
    [found] = engine.generate(REQUESTS[-1])
    assert (found.cached, found.tokens) == (len(REQUESTS[-1].tokens) // 128 * 128, expected[-1])
    assert idle(engine)


def test_several_samples_of_a_prompt(engine: Engine, expected: list[list[int]]) -> None:
    engine.ask("reset")
    for _ in range(3):
        [answer] = engine.generate(Request(REQUESTS[-1].tokens, max_tokens=40, n=3))
        assert answer.tokens == 3 * expected[-1]
    assert answer.cached == len(REQUESTS[-1].tokens) // 128 * 128
    assert idle(engine)


def test_a_request_for_one_token(engine: Engine, expected: list[list[int]]) -> None:
    ones = [Request(request.tokens, max_tokens=1) for request in REQUESTS]
    engine.ask("reset")
    engine.ask("reset_vllm")
    assert said(engine.generate(*ones)) == [answer[:1] for answer in expected]
    engine.ask("reset_vllm")
    again = engine.generate(*ones[-1:])
    assert said(again) == [expected[-1][:1]]
    assert again[0].cached == len(ones[-1].tokens) // 128 * 128
    assert idle(engine)
