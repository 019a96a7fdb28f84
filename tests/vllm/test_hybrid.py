"""Models whose layers attend in different ways: vLLM gives each group of them blocks of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, flip, idle, save_llama, tokens

WINDOW = 200
"""Neither whole blocks nor a whole chunk."""
SHARED = tokens(1024, seed=201)
LONG = [Request([*SHARED[: 256 * (i % 5)], *tokens(300 + 161 * i, seed=210 + i)]) for i in range(6)]
SHORT = [Request(tokens(20 + 90 * i, seed=230 + i), max_tokens=60) for i in range(6)]
MIXED = [*LONG, *SHORT]
WHOLE = Request(SHARED)
TALK = Request(tokens(200, seed=240), max_tokens=120)
"""Its answer completes a chunk while it is being decoded."""
REQUESTS = [*MIXED, WHOLE, TALK]


BLOCK_NBYTES = 2 * 2 * 128 * 2 * 32 * 4
"""A group's layers x KV heads x tokens x (K and V) x dim x float32."""


def cache(folder: Path, processes: int = 1) -> dict[str, object]:
    options = {"path": str(folder), "processes": processes}
    return {
        "chunk_tokens": 256,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "256MiB"},
            {"name": "disk", "backend": "disk", "capacity": "512MiB", "options": options},
        ],
    }


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a window in two of three layers, and so with three groups in vLLM."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    folder = tmp_path_factory.mktemp("model") / "hybrid"
    return save_llama(folder, num_layers=6, layer_types=layers, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def plain(hybrid: Path, log: Path) -> Iterator[Engine]:
    """vLLM without a connector: the oracle."""
    with Engine(hybrid, log) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    """Each request's tokens, computed alone."""
    return [said(plain.generate(request))[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def first(hybrid: Path, log: Path, folder: Path) -> Iterator[Engine]:
    # Few tokens a step, so that windows move on while a chunk is computed, and so little memory that
    # running requests are preempted.
    little = {"kv_cache_memory_bytes": 44 * BLOCK_NBYTES, "max_model_len": 2048}
    with Engine(hybrid, log, cache(folder), max_num_batched_tokens=208, max_num_seqs=12, **little) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm(first: Engine, expected: list[list[int]]) -> list[Answer]:
    """Answers to requests that were all seen before."""
    assert said(first.generate(*REQUESTS)) == expected
    return [first.generate(request)[0] for request in REQUESTS]


def test_vllm_keeps_three_groups_of_layers(first: Engine) -> None:
    assert first.ask("stats")["groups"] == [WINDOW, WINDOW, None]


def test_what_is_loaded_into_every_group_answers_as_what_is_computed(
    warm: list[Answer], expected: list[list[int]]
) -> None:
    assert said(warm) == expected


def test_a_prompt_is_loaded_up_to_its_last_whole_block(warm: list[Answer]) -> None:
    for request, answer in zip(REQUESTS, warm, strict=True):
        whole = len(request.tokens) // 128 * 128
        assert answer.cached == min(whole, len(request.tokens) - 1)


def test_the_next_turn_of_a_chat_finds_what_was_decoded(
    first: Engine, warm: list[Answer], plain: Engine
) -> None:
    turn = Request([*TALK.tokens, *warm[-1].tokens[:100]])
    [answer] = first.generate(turn)
    assert answer.cached == 256
    assert said([answer]) == said(plain.generate(turn))


def test_preempted_requests_answer_as_others(
    first: Engine, warm: list[Answer], expected: list[list[int]]
) -> None:
    assert said(first.generate(*REQUESTS)) == expected
    assert first.ask("preemptions") > 0, "nothing was preempted: this test needs less KV memory"
    assert idle(first)


def test_aborted_requests_hold_nothing(first: Engine, warm: list[Answer], expected: list[list[int]]) -> None:
    """Before their first step, while they wait for KV, during prefill, and while they decode."""
    for num_steps in (0, 1, 2, 3, 5, 8, 13):
        for _ in range(2):  # from disk, and from memory
            left = first.halfway(REQUESTS, num_steps, "abort")
            assert left["running"] > 0
            assert idle(first)
        first.ask("clear", "cpu")
    assert said(first.generate(*REQUESTS)) == expected


def test_what_was_promised_and_is_gone_is_computed_and_the_engine_goes_on(
    first: Engine, warm: list[Answer], expected: list[list[int]]
) -> None:
    first.ask("lose_promises", True)
    assert said(first.generate(*REQUESTS)) == expected
    assert first.ask("lost_promises") > 0, "nothing was promised"
    first.ask("lose_promises", False)
    assert said(first.generate(*REQUESTS)) == expected
    assert idle(first)


def test_a_new_process_loads_from_disk_and_computes_what_is_damaged_there(
    first: Engine, warm: list[Answer], hybrid: Path, log: Path, folder: Path, expected: list[list[int]]
) -> None:
    first.close()  # the last test that uses it
    policy = {"kv_load_failure_policy": "fail"}
    with Engine(hybrid, log, cache(folder), transfer=policy, enable_prefix_caching=True) as engine:
        answers = engine.generate(*REQUESTS)
        assert said(answers) == expected
        assert [answer.cached for answer in answers] == [answer.cached for answer in warm]
        engine.ask("reset_vllm")
        engine.ask("lose_promises", True)
        [lost] = engine.generate(WHOLE)
        assert (lost.reason, lost.tokens) == ("error", [])
        engine.ask("lose_promises", False)
        engine.ask("clear", "cpu")
        for file in folder.rglob("*"):
            if file.stat().st_size > 64 << 10:
                flip(file)
        assert said(engine.generate(*REQUESTS)) == expected
        assert engine.ask("stats")["tiers"]["disk"]["rejected"] > 0
        assert idle(engine)


def test_two_ranks_load_what_every_group_of_both_has(
    hybrid: Path, log: Path, tmp_path: Path, warm: list[Answer], expected: list[list[int]]
) -> None:
    ranks = {"tensor_parallel_size": 2, "max_num_batched_tokens": 384}
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Engine(hybrid, log, cache(tmp_path, processes=2), environment=threads, **ranks) as engine:
        assert said(engine.generate(*REQUESTS)) == expected
        again = engine.generate(*REQUESTS)
        assert said(again) == expected
        assert [answer.cached for answer in again] == [answer.cached for answer in warm]
