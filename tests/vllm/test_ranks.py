"""Two ranks in processes of their own, each with half the KV heads, over one config and one directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, idle_in_ranks, tokens

SHARED = tokens(512, seed=11)
REQUESTS = [Request([*SHARED[: 256 * (i % 3)], *tokens(150 + 131 * i, seed=110 + i)]) for i in range(8)]
OPTIONS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 384}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    path = str(tmp_path_factory.mktemp("disk"))
    return {
        "chunk_tokens": 256,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {
                "name": "disk",
                "backend": "disk",
                "capacity": "512MiB",
                "options": {"path": path, "processes": 2},
            },
        ],
    }


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [said(plain.generate(request))[0] for request in REQUESTS]


def test_two_ranks_load_what_they_both_have(
    model: Path, log: Path, expected: list[list[int]], cache: dict[str, object]
) -> None:
    whole = [min(len(request.tokens) // 128 * 128, len(request.tokens) - 1) for request in REQUESTS]
    with Engine(model, log, cache, environment=ENVIRONMENT, **OPTIONS) as engine:
        assert said(engine.generate(*REQUESTS)) == expected
        warm = engine.generate(*REQUESTS)
        assert said(warm) == expected
        assert [answer.cached for answer in warm] == whole

    with Engine(model, log, cache, environment=ENVIRONMENT, **OPTIONS) as engine:
        again = engine.generate(*REQUESTS)
        assert said(again) == expected
        assert [answer.cached for answer in again] == whole


def test_ranks_whose_tier_fails_one_get_in_five_at_random(
    model: Path, log: Path, expected: list[list[int]]
) -> None:
    """And one of which loses what both have promised, once: what the other computed behind it is not kept."""
    far = {"name": "far", "backend": "faulty", "capacity": "64MiB", "breaker": {"failures": 1000}}
    tiers = [{"name": "cpu", "backend": "cpu", "capacity": "64MiB"}, far]
    cache = {"chunk_tokens": 256, "tiers": tiers}
    here = {"kv_connector": "Connector", "kv_connector_module_path": "vllm_rank"}
    with Engine(model, log, cache, transfer=here, environment=ENVIRONMENT, **OPTIONS) as engine:
        assert said(engine.generate(*REQUESTS)) == expected
        engine.ask("in_ranks", "fail_gets", 5)
        for _ in range(3):
            engine.ask("in_ranks", "held")  # what waits is written
            engine.ask("in_ranks", "clear", "cpu")
            assert said(engine.generate(*REQUESTS)) == expected
        assert all(engine.ask("in_ranks", "failed_gets"))
        engine.ask("in_ranks", "fail_gets", 0)
        engine.ask("in_one_rank", 1, "lose_promises", True)
        assert said(engine.generate(*REQUESTS)) == expected
        assert engine.ask("in_one_rank", 1, "lost_promises")
        engine.ask("in_one_rank", 1, "lose_promises", False)
        assert said(engine.generate(*REQUESTS)) == expected
        assert idle_in_ranks(engine, 2)
