"""Runs the program of docs/how-to/use-the-engine.md exactly as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "use-the-engine.md").read_text(encoding="utf-8")
CHECK = """
from lmcache_core import KVSource, KVTarget, LayerSource, LayerTarget
source: KVSource = PromptKV(1)
target: KVTarget = PromptKV(1)
layer_source: LayerSource = LayerKV(1)
layer_target: LayerTarget = LayerKV(1)
again = CacheEngine(config, model=model, part=part)
kv, loaded = prefill(again, prompt)
right = PromptKV(len(prompt))
compute(right, prompt, 0)
assert loaded.num_tokens == 1488
assert np.array_equal(kv.keys, right.keys) and np.array_equal(kv.values, right.values)
kv, start = prefill_by_layers(again, prompt)
assert start == 1488
assert np.array_equal(kv.keys, right.keys) and np.array_equal(kv.values, right.values)
print("right")
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    [config] = blocks("yaml")
    (tmp_path / "cache.yaml").write_text(config, encoding="utf-8")
    return tmp_path


def run(folder: Path, code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_program_loads_in_a_second_process_what_the_first_computed(folder: Path) -> None:
    program = "\n".join(blocks("python"))
    first = run(folder, program)
    assert first[0] == "loaded 0 of 1500 tokens: {}"
    assert any(line.startswith("retrieved 1488 of 1600 tokens in ") for line in first)
    second = run(folder, program)
    assert second[0] == "loaded 1488 of 1500 tokens: {'local': 1488}"
    assert f"`{second[0]}`" in PAGE
    assert "1488 tokens came layer by layer" in second
    assert "0 tokens of that tenant are known" in second
    assert "1488 tokens can be loaded: {'memory': 1488}" in second
    assert any(line.split()[:2] == ["local", "up"] for line in second)


def test_its_kv_is_loaded_as_it_was_computed(folder: Path) -> None:
    program = "\n".join(blocks("python"))
    run(folder, program)
    assert run(folder, program + CHECK)[-1] == "right"
