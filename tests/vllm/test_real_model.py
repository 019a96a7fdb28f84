"""SmolLM2-135M, a real model with real weights; and the example, as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_session import ENVIRONMENT, Engine, Request

from lmcache_core.cli.demo_model import find_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smollm() -> Path:
    """As safetensors, which is what vLLM reads."""
    return find_model(None, ROOT / ".demo")


def test_a_real_model_answers_as_without_a_cache(smollm: Path, log: Path, tmp_path: Path) -> None:
    requests = [
        Request([(position * 7919 + seed) % 40000 + 100 for position in range(300 + 90 * seed)], max_tokens=8)
        for seed in range(3)
    ]
    with Engine(smollm, log) as engine:
        expected = [engine.generate(request)[0].tokens for request in requests]
    tier = {"name": "cpu", "backend": "cpu", "capacity": "256MiB"}
    with Engine(smollm, log, {"chunk_tokens": 256, "tiers": [tier]}, max_num_batched_tokens=256) as engine:
        cold, warm = engine.generate(*requests), engine.generate(*requests)
    assert [answer.tokens for answer in cold] == expected
    assert [answer.tokens for answer in warm] == expected
    assert [answer.cached for answer in warm] == [256, 384, 384]


def test_the_example_finds_the_first_turn_and_the_run_before(smollm: Path, tmp_path: Path) -> None:
    def run() -> list[int]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "vllm" / "two_turn_chat.py"), str(smollm)],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [int(number) for number in re.findall(r"^(\d+) of \d+ prompt tokens", done.stdout, re.M)]

    first, second = run(), run()
    assert first[0] == 0
    assert first[1] > 512
    assert second[0] >= 512
    assert len(first) == len(second) == 2
