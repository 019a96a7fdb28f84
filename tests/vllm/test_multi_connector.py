"""Beside another connector in vLLM's MultiConnector, whose loads fail, and whose handshake hides ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, tokens

PROMPTS = [Request(tokens(600 + 150 * i, seed=500 + i)) for i in range(3)]
WHOLE = [len(prompt.tokens) // 128 * 128 for prompt in PROMPTS]
OTHERS = [Request(tokens(1500, seed=510 + i)) for i in range(2)]
CACHE = {"chunk_tokens": 256, "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "64MiB"}]}


def beside_a_partner() -> dict[str, object]:
    each = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ours = {"kv_connector_extra_config": {"config": CACHE}, "kv_connector": "LMCacheCoreConnector", **each}
    partner = {"kv_connector": "Partner", "kv_connector_module_path": "vllm_partner", **each}
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [partner, ours]},
        **each,
    }


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_kept_of_what_was_computed_behind_its_failed_loads(
    model: Path, log: Path, plain: Engine, num_ranks: int
) -> None:
    expected = [said(plain.generate(prompt))[0] for prompt in PROMPTS]
    with Engine(
        model,
        log,
        kv_transfer_config=beside_a_partner(),
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if num_ranks == 2 else {},
        tensor_parallel_size=num_ranks,
    ) as engine:
        engine.generate(Request(tokens(20, seed=520)))  # several ranks are asked where they are with it
        engine.generate(*OTHERS)  # so that no block holds by chance what it should
        before = log.read_text().count("Recovered from KV load failure")
        assert said([engine.generate(prompt)[0] for prompt in PROMPTS]) == expected
        assert log.read_text().count("Recovered from KV load failure") - before == len(PROMPTS)
        again = [engine.generate(prompt)[0] for prompt in PROMPTS]
    assert said(again) == expected
    assert [answer.cached for answer in again] == WHOLE
