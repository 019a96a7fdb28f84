"""`lmcache-core explain` on what the real vLLM stored: each thing that makes a miss is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from vllm_adapters import RANK, save_adapter
from vllm_session import Engine, Request, tokens

from lmcache_core.cli.main import main

PROMPT = tokens(700, seed=61)
SALTED = tokens(700, seed=62)
TUNED = tokens(700, seed=63)


@pytest.fixture(params=[1])
def cache(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, object]:
    """Of one process, or as many as the test says."""
    return {
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {
                "name": "disk",
                "backend": "disk",
                "capacity": "128MiB",
                "options": {"path": str(tmp_path / "kv"), "processes": request.param},
            },
        ]
    }


@pytest.fixture
def serve(model: Path, tmp_path: Path, cache: dict[str, object]) -> Callable[..., Engine]:
    """Starts an engine whose log has this name."""

    def serve(log: str, **options: Any) -> Engine:
        return Engine(model, tmp_path / log, cache, **{"max_model_len": 1024, **options})

    return serve


@pytest.fixture
def explain(tmp_path: Path, cache: dict[str, object]) -> Callable[..., str]:
    """What the command says of an engine with this log, and of these tokens."""
    config = tmp_path / "cache.yaml"
    config.write_text(json.dumps(cache))

    def explain(log: str, prompt: list[int], *options: str, held: bool) -> str:
        ids = tmp_path / "ids.json"
        ids.write_text(json.dumps(prompt))
        asked = ["explain", "--config", str(config), "--tokens", str(ids)]
        result = CliRunner().invoke(main, [*asked, "--vllm-log", str(tmp_path / log), *options])
        assert result.exit_code == (0 if held else 1), result.output
        return result.stdout

    return explain


def test_a_hit_and_what_makes_each_kind_of_miss(
    serve: Callable[..., Engine], explain: Callable[..., str], tmp_path: Path
) -> None:
    adapter = ("tuned", 1, str(save_adapter(tmp_path / "adapter", seed=1)))
    with serve("whole", enable_lora=True, max_lora_rank=RANK) as engine:
        engine.generate(Request(PROMPT), Request(SALTED, salt="a tenant"), Request(TUNED, adapter=adapter))
        shutil.copy(engine.log, engine.log.with_name("first"))  # up to here
        assert engine.ask("reset")
    hit = explain("first", PROMPT, held=True)
    assert hit.startswith("It is a hit: 640 of 700 tokens are held.")
    assert "tokens 0 to 639: in disk" in hit
    assert explain("first", SALTED, "--salt", "a tenant", held=True).startswith("It is a hit: 640 of 700")
    assert explain("first", PROMPT, "--salt", "another", held=False).startswith(
        "640 of these tokens are held, but under no cache_salt; 0 are under what was asked for."
    )
    assert "(another prompt, salt or adapter)" in explain("first", SALTED, held=False)
    assert explain("first", [*PROMPT[:300], *SALTED], held=True).startswith("256 of 1000 tokens are held;")

    assert explain("first", TUNED, "--lora", "tuned", held=True).startswith("It is a hit: 640 of 700")
    assert explain("first", TUNED, held=False).startswith(
        "640 of these tokens are held, but under lora_request 'tuned'; 0 are under what was asked for."
    )

    with serve("dtype", dtype="bfloat16"):
        pass  # it needn't have stored anything
    dtype = explain("dtype", PROMPT, held=False)
    assert dtype.startswith("Another model holds 640 of these tokens; this one differs from it in: config.")
    assert "config.compute_dtype: stored 'float32', asked about 'bfloat16' (from --dtype)" in dtype

    with serve("block", block_size=64):
        pass
    block = explain("block", PROMPT, held=False)
    assert block.startswith("Another part of this model holds 640 of these tokens, the one asked about 0;")
    assert "they differ in: part.content_format." in block
    assert "float32 128', asked about 'vllm " in block
    assert "--block-size)" in block

    assert explain("whole", PROMPT, held=False).startswith(
        "640 of these tokens are held, but under the epoch before reset 1 of the cache; 0 are"
    )


@pytest.mark.parametrize("cache", [2], indirect=True)
def test_every_rank_is_asked_for_its_own_part(
    serve: Callable[..., Engine], explain: Callable[..., str]
) -> None:
    with serve("ranks", tensor_parallel_size=2, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}) as engine:
        engine.generate(Request(PROMPT))
    said = explain("ranks", PROMPT, held=True)
    assert said.startswith("It is a hit: 640 of 700 tokens are held.")
    assert "Rank 0: It is a hit" in said
    assert "Rank 1: It is a hit" in said
