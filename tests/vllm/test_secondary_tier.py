"""vLLM's own OffloadingConnector with our tier behind it: every request ends, with the right tokens.

vLLM's CPU tier holds little more than one prompt here, so that what is known comes from our tier.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, save_llama, tokens

CHUNK_NBYTES = 3 * 2 * 128 * 2 * 32 * 4
"""Layers x KV heads x tokens x (K and V) x dim x float32: one block of vLLM's, and one of its chunks."""
PROMPTS = [Request(tokens(700 + 130 * i, seed=300 + i)) for i in range(5)]
WHOLE = [len(prompt.tokens) // 128 * 128 for prompt in PROMPTS]


def offload(
    num_chunks: int = 12, *, options: dict[str, object] | None = None, **tier: object
) -> dict[str, object]:
    """vLLM's connector with a CPU tier of so many chunks, and ours."""
    entry = {"type": "lmcache-core", "module_path": "lmcache_core.connectors.vllm.tier", "staging": "16MiB"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_offload_spec",
            "cpu_bytes_to_use": num_chunks * CHUNK_NBYTES,
            "secondary_tiers": [{**entry, **tier, "options": options or {}}],
        },
    }


def on_disk(folder: Path, capacity: str = "64MiB", **changes: object) -> dict[str, object]:
    return offload(backend="disk", capacity=capacity, options={"path": str(folder)}, **changes)


def ask(engine: Engine) -> list[Answer]:
    """One prompt after the other, and a short one that has vLLM hand over the last one's chunks."""
    answers = [engine.generate(prompt)[0] for prompt in PROMPTS]
    engine.generate(Request(tokens(20, seed=1)))
    assert all(answer.reason == "length" for answer in answers)
    return answers


def said(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def all_found(engine: Engine, expected: list[list[int]]) -> bool:
    """Whether every prompt is found in the end: on a slow machine a transfer may miss its short deadline."""
    for _ in range(10):
        found = ask(engine)
        assert said(found) == expected
        if cached(found) == WHOLE:
            return True
    return False


def slots(folder: Path) -> list[Path]:
    return [path for path in folder.glob("shard-*/slots/*/*") if path.stat().st_size > CHUNK_NBYTES]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return [plain.generate(prompt)[0].tokens for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(
    model: Path, log: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A disk tier as an engine left it that has answered all prompts, twice."""
    folder = tmp_path_factory.mktemp("disk")
    with Engine(model, log, kv_transfer_config=on_disk(folder)) as engine:
        cold, warm = ask(engine), ask(engine)
    assert said(cold) == said(warm) == expected
    assert cached(cold) == [0] * len(PROMPTS)
    assert cached(warm) == WHOLE
    return folder


def test_a_restarted_engine_loads_from_disk_and_survives_the_loss_of_the_files(
    model: Path, log: Path, folder: Path, expected: list[list[int]]
) -> None:
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    with Engine(model, log, kv_transfer_config=on_disk(copy)) as engine:
        found = ask(engine)
        assert said(found) == expected
        assert cached(found) == WHOLE
        for path in slots(copy):
            path.unlink()
        lost = ask(engine)
        assert said(lost) == expected
        assert sum(cached(lost)) < sum(WHOLE)


def test_flipped_bytes_are_noticed_and_computed_anew(
    model: Path, log: Path, folder: Path, expected: list[list[int]]
) -> None:
    copy = folder.with_name("flipped")
    shutil.copytree(folder, copy)
    damaged = slots(copy)
    assert len(damaged) == sum(WHOLE) // 128
    for path in damaged:
        with path.open("r+b") as file:
            file.seek(-100, 2)
            byte = file.read(1)[0]
            file.seek(-100, 2)
            file.write(bytes([byte ^ 1]))
    with Engine(model, log, kv_transfer_config=on_disk(copy), disable_log_stats=False) as engine:
        found = ask(engine)
        assert said(found) == expected
        assert cached(found) == [0] * len(PROMPTS)
        assert all_found(engine, expected)  # a chunk that nobody has read yet is not known to be damaged
        assert engine.ask("metrics")["vllm:lmcache_core_tier_rejected_frames"] >= len(damaged)


def test_other_weights_under_the_same_path_share_nothing(
    model: Path, log: Path, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    served, copy = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(folder, copy)
    shutil.copytree(save_llama(tmp_path / "fine-tune", seed=1), served)
    with Engine(served, log, kv_transfer_config=on_disk(copy)) as engine:
        others = ask(engine)
        assert cached(others) == [0] * len(PROMPTS)
        assert said(others) != expected
    shutil.rmtree(served)
    shutil.copytree(model, served)
    with Engine(served, log, kv_transfer_config=on_disk(copy)) as engine:
        mine = ask(engine)
        assert said(mine) == expected
        assert cached(mine) == WHOLE  # by its weights, not by its path


def test_a_tier_smaller_than_the_prompts_stays_within_its_bound(
    model: Path, log: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    capacity = 16 * CHUNK_NBYTES
    with Engine(model, log, kv_transfer_config=on_disk(tmp_path, f"{capacity >> 10}KiB")) as engine:
        for _ in range(2):
            assert said(ask(engine)) == expected
            occupied = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
            assert occupied <= capacity


def test_a_full_disk_keeps_what_it_can_and_everything_when_it_has_room(
    model: Path, log: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Others leave room for half of the prompts' chunks, and the tier thinks that all would fit."""
    all_nbytes = sum(WHOLE) // 128 * CHUNK_NBYTES
    transfer = on_disk(tmp_path / "kv")
    with Engine(model, log, room=(tmp_path, 4 * all_nbytes), kv_transfer_config=transfer) as engine:
        engine.ask("fill", str(tmp_path), all_nbytes // 2)
        engine.ask("believe_full_for", 0.5)
        free = []
        for _ in range(2):
            assert said(ask(engine)) == expected
            free.append(engine.ask("free_bytes", str(tmp_path)))
            assert said(engine.generate(*PROMPTS)) == expected
            free.append(engine.ask("free_bytes", str(tmp_path)))
        assert min(free) < 2 * CHUNK_NBYTES
        num_kept = 0
        for _ in range(3):
            few = [engine.generate(PROMPTS[i])[0] for i in (1, 3)]
            engine.generate(Request(tokens(20, seed=1)))
            assert said(few) == [expected[1], expected[3]]
            num_kept += sum(cached(few))
        assert num_kept > 0
        engine.ask("fill", str(tmp_path), None)
        assert all_found(engine, expected)


def test_two_ranks_share_a_tier_and_nothing_with_one_rank(
    model: Path, log: Path, folder: Path, expected: list[list[int]]
) -> None:
    copy = folder.with_name("ranks")
    shutil.copytree(folder, copy)
    transfer = on_disk(copy)
    extra = transfer["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    extra["blocks_per_chunk"] = 2
    with Engine(
        model,
        log,
        kv_transfer_config=transfer,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
    ) as engine:
        cold, warm = ask(engine), ask(engine)
    assert said(cold) == said(warm) == expected
    assert cached(cold) == [0] * len(PROMPTS)
    assert cached(warm) == [len(prompt.tokens) // 256 * 256 for prompt in PROMPTS]


@pytest.fixture(scope="module")
def faulty(model: Path, log: Path) -> Iterator[Engine]:
    """A tier that obeys the test."""
    transfer = offload(
        backend="faulty",
        capacity="64MiB",
        deadline="300ms",
        job_deadline="1s",
        breaker={"failures": 1000},
    )
    with Engine(model, log, kv_transfer_config=transfer) as engine:
        yield engine


def test_a_tier_that_fails_one_get_in_three(faulty: Engine, expected: list[list[int]]) -> None:
    assert said(ask(faulty)) == expected
    faulty.ask("fail_gets", 3)
    for _ in range(2):
        assert said(ask(faulty)) == expected
        assert said(faulty.generate(*PROMPTS)) == expected  # at once: more than vLLM's CPU tier holds
    assert faulty.ask("failed_gets") > 0
    faulty.ask("fail_gets", 0)
    assert said(faulty.generate(*PROMPTS)) == expected
    assert all_found(faulty, expected)


def test_a_tier_that_hangs_costs_a_request_its_deadline(faulty: Engine, expected: list[list[int]]) -> None:
    assert said(ask(faulty)) == expected
    faulty.ask("hang", "get", True)
    assert said(ask(faulty)) == expected
    faulty.ask("hang", "get", False)
    assert all_found(faulty, expected)


def test_after_a_reset_nothing_of_before_is_used(faulty: Engine, expected: list[list[int]]) -> None:
    assert all_found(faulty, expected)
    faulty.ask("reset")
    anew = ask(faulty)
    assert said(anew) == expected
    assert cached(anew) == [0] * len(PROMPTS)
    assert all_found(faulty, expected)
