"""With vLLM's prefix cache on requests share blocks at once, also those of a load that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Engine, Request, idle, tokens

SHARED = tokens(1024, seed=500)
REQUESTS = [Request([*SHARED, *tokens(500, seed=501 + i)], max_tokens=8) for i in range(7)]
BLOCK_NBYTES = 3 * 2 * 128 * 2 * 32 * 4
"""Layers x KV heads x tokens x (K and V) x dim x float32."""


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [plain.generate(request)[0].tokens for request in REQUESTS]


@pytest.fixture(scope="module")
def engine(model: Path, log: Path) -> Iterator[Engine]:
    """What one request computes again takes several steps, in which others go on."""
    tier = {"name": "cpu", "backend": "cpu", "capacity": "64MiB"}
    with Engine(
        model,
        log,
        {"chunk_tokens": 256, "tiers": [tier]},
        kv_cache_memory_bytes=40 * BLOCK_NBYTES,
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=256,
        enable_prefix_caching=True,
    ) as engine:
        engine.generate(REQUESTS[0])
        yield engine


@pytest.fixture
def losing(engine: Engine) -> Engine:
    """Loses what it promises. No block holds by chance what it should."""
    engine.generate(*(Request(tokens(1500, seed=520 + i)) for i in range(2)))
    assert engine.ask("reset_vllm")
    engine.ask("lose_promises", True)
    return engine


def answers_and_keeps(engine: Engine, numbers: list[int], expected: list[list[int]]) -> bool:
    """Whether those requests are answered rightly, then and with the KV that was stored of them."""
    requests, wanted = [REQUESTS[i] for i in numbers], [expected[i] for i in numbers]
    answers = [answer.tokens for answer in engine.generate(*requests)]
    engine.ask("lose_promises", False)
    assert engine.ask("reset_vllm")
    again = engine.generate(*requests)
    assert all(answer.cached >= len(SHARED) for answer in again)
    return answers == wanted == [answer.tokens for answer in again] and idle(engine)


def test_requests_that_share_a_load_that_fails(losing: Engine, expected: list[list[int]]) -> None:
    assert answers_and_keeps(losing, [1, 2, 3], expected)


def test_a_request_that_comes_while_a_failed_load_is_computed(
    losing: Engine, expected: list[list[int]]
) -> None:
    losing.halfway(REQUESTS[4:5], 1, "abort")
    assert answers_and_keeps(losing, [5, 6], expected)
