"""Whatever a tier does to what it keeps, the model's answers stay those of a run without a cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from faulty_backends import Controls, faulty
from tiny_models import greedy, llama, prompt, tiers

from lmcache_core.connectors.transformers import CachedGenerator
from lmcache_core.identity import StorageKey

NEW = 8
DEADLINE_S = 1.0
PATIENCE_S = 30.0  # what a busy machine may take; a hang lasts until it is let go
PROMPTS = [prompt(64 * 4 + 20 + 16 * number, seed=number) for number in range(4)]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[tuple[int, ...]]:
    return [greedy(model, tokens, NEW) for tokens in PROMPTS]


def remote(deadline_s: float = PATIENCE_S) -> dict[str, Any]:
    """One tier that isn't this process's memory, so that every load is checked."""
    tier = {"name": "remote", "backend": "faulty", "capacity": "64MiB", "deadline": deadline_s}
    return {**tiers(), "tiers": [{**tier, "breaker": {"failures": 1000}}]}


def answers(generator: CachedGenerator) -> list[tuple[int, ...]]:
    results = [generator.generate(tokens, max_new_tokens=NEW)[0].tokens for tokens in PROMPTS]
    assert generator.flush(PATIENCE_S)
    return results


def loaded(generator: CachedGenerator) -> list[int]:
    """Prompt tokens loaded by each prompt."""
    return [
        generator.generate(tokens, max_new_tokens=1, store=False)[0].prompt.num_loaded_tokens
        for tokens in PROMPTS
    ]


def flip(controls: Controls) -> None:
    for number, (key, (value, parent)) in enumerate(sorted(controls.values.items())):
        at = (number * 4099) % len(value)
        controls.values[key] = (value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :], parent)


def truncate(controls: Controls) -> None:
    for key, (value, parent) in controls.values.items():
        controls.values[key] = (value[: len(value) // 2 // 4096 * 4096], parent)


def swap(controls: Controls) -> None:
    """Every value takes the next one's place, among those of its length."""
    by_length: dict[int, list[StorageKey]] = {}
    for key, (value, _) in controls.values.items():
        by_length.setdefault(len(value), []).append(key)
    for keys in by_length.values():
        values = [controls.values[key] for key in keys]
        controls.values.update(zip(keys, [*values[1:], values[0]], strict=True))


@pytest.mark.parametrize("damage", [flip, truncate, swap])
def test_damaged_values_change_no_answer_and_the_tier_heals(
    model: Any, expected: list[tuple[int, ...]], damage: Callable[[Controls], None]
) -> None:
    controls = Controls()
    with CachedGenerator(model, remote(), registry=faulty(controls)) as generator:
        assert answers(generator) == expected
        sound = loaded(generator)
        assert all(sound)
        damage(controls)
        assert answers(generator) == expected
        assert answers(generator) == expected
        assert loaded(generator) == sound
        assert generator.engine.stats().memory.leases == 0


def test_a_store_that_fails_one_get_in_five_changes_no_answer(
    model: Any, expected: list[tuple[int, ...]]
) -> None:
    controls = Controls()
    calls = count()
    with CachedGenerator(model, remote(), registry=faulty(controls)) as generator:
        assert answers(generator) == expected
        controls.fail = lambda op, key: op == "get" and next(calls) % 5 == 4
        for _ in range(3):
            assert answers(generator) == expected
        assert generator.engine.stats().memory.leases == 0


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_store_that_hangs_costs_its_deadline_and_no_answer(
    model: Any, expected: list[tuple[int, ...]], operation: str
) -> None:
    controls = Controls()
    with CachedGenerator(model, remote(DEADLINE_S), registry=faulty(controls)) as generator:
        if operation == "get":
            assert answers(generator) == expected
        controls.hang(operation)
        try:
            started = time.monotonic()
            [result] = generator.generate(PROMPTS[0], max_new_tokens=NEW)
            assert time.monotonic() - started < DEADLINE_S + PATIENCE_S
            assert result.tokens == expected[0]
            assert result.prompt.num_loaded_tokens == 0
        finally:
            controls.let_go(operation)
        assert generator.flush(PATIENCE_S)
        assert answers(generator) == expected


def test_flipped_bytes_in_the_disk_tiers_files_change_no_answer(
    model: Any, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with CachedGenerator(model, tiers(tmp_path)) as generator:
        assert answers(generator) == expected
    values = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 20_000]
    assert len(values) >= 4 * len(PROMPTS)
    for file in values:
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        file.write_bytes(damaged)
    with CachedGenerator(model, tiers(tmp_path)) as generator:
        assert answers(generator) == expected
    with CachedGenerator(model, tiers(tmp_path)) as generator:
        results = [generator.generate(tokens, max_new_tokens=NEW)[0] for tokens in PROMPTS]
        assert [result.tokens for result in results] == expected
        assert all(set(result.prompt.tokens_by_tier) == {"disk"} for result in results)
