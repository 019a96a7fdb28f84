"""A disk tier whose file system is full, or whose files vanish: every request ends, with the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, idle, tokens

SHARED = tokens(1024, seed=7)
REQUESTS = [Request([*SHARED[: 256 * (i % 5)], *tokens(150 + 61 * i, seed=70 + i)]) for i in range(12)]
CHUNK_NBYTES = 3 * 2 * 256 * 2 * 32 * 4
"""Layers x KV heads x tokens x (K and V) x dim x float32."""
ROOM = 12 * CHUNK_NBYTES
"""Less than half of what the requests' KV takes, and much less than the tier's capacity."""


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [said(plain.generate(request))[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full")


@pytest.fixture(scope="module")
def engine(model: Path, log: Path, folder: Path) -> Iterator[Engine]:
    cache = {
        "chunk_tokens": 256,
        "memory": {"staging": "32MiB"},
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "32MiB"},
            {"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": str(folder)}},
        ],
    }
    little = {"kv_cache_memory_bytes": 26 * (CHUNK_NBYTES // 2), "max_model_len": 2048}
    with Engine(model, log, cache, room=(folder, ROOM), **little) as engine:
        yield engine


def test_a_full_disk_keeps_what_it_can(engine: Engine, folder: Path, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert said(engine.generate(*REQUESTS)) == expected
        assert idle(engine)
        engine.ask("clear", "cpu")
    assert engine.ask("free_bytes", str(folder)) < CHUNK_NBYTES
    assert engine.ask("stats")["tiers"]["disk"]["evicted: capacity"] > 0
    found = engine.generate(*REQUESTS)
    assert said(found) == expected
    assert sum(answer.cached for answer in found) > 0
    assert idle(engine)


def test_files_that_vanish_after_the_lookup_are_computed(
    engine: Engine, folder: Path, expected: list[list[int]]
) -> None:
    engine.ask("clear", "cpu")
    engine.ask("lose_files", str(folder), "prefetch")
    assert said(engine.generate(*REQUESTS)) == expected
    assert engine.ask("lose_files", str(folder), "") > 0
    assert idle(engine)


def test_files_that_vanish_after_the_promise_are_not_missed(
    engine: Engine, folder: Path, expected: list[list[int]]
) -> None:
    engine.ask("reset")  # so that it is stored again
    assert said(engine.generate(REQUESTS[-1])) == expected[-1:]
    assert idle(engine)  # it is on the disk
    engine.ask("clear", "cpu")
    engine.ask("lose_files", str(folder), "retrieve")
    found = engine.generate(REQUESTS[-1])
    assert said(found) == expected[-1:]
    assert found[0].cached == len(REQUESTS[-1].tokens) // 128 * 128
    assert engine.ask("lose_files", str(folder), "") > 0
    assert idle(engine)


def test_many_requests_leave_nothing_behind(engine: Engine) -> None:
    resident = []
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
