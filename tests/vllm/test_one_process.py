"""Several engines made in one process, one after the other and side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from vllm_session import ENVIRONMENT, OPTIONS, START_S, tokens

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

arguments, prompt = json.loads(sys.argv[1])

def cached(llm):
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output.num_cached_tokens

first = LLM(**arguments)
print("first", cached(first), cached(first))
first.llm_engine.engine_core.shutdown()
second = LLM(**arguments)
print("second", cached(second))
try:
    LLM(**arguments)
except Exception as error:
    print("third", type(error).__name__, error)
print("second again", cached(second))
"""


def test_an_engine_follows_one_that_was_shut_down_and_is_refused_beside_one(
    model: Path, tmp_path: Path
) -> None:
    """vLLM would hand the blocks of the one to the connector of the other."""
    cache = {
        "chunk_tokens": 256,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {
                "name": "disk",
                "backend": "disk",
                "capacity": "64MiB",
                "options": {"path": str(tmp_path / "kv")},
            },
        ],
    }
    arguments = {
        "model": str(model),
        **OPTIONS,
        "kv_transfer_config": {
            "kv_connector": "LMCacheCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"config": cache, "prefetch_deadline": "60s"},
        },
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([arguments, tokens(700)])],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * START_S,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("first", "second", "third"))]
    assert [line for line in told if not line.startswith("third")] == [
        "first 0 640",
        "second 640",
        "second again 640",
    ], done.stdout[-6000:]
    [third] = (line for line in told if line.startswith("third"))
    assert third.startswith("third UnsupportedModel vLLM keeps one connector a process"), third
