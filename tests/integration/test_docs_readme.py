"""Runs the README's example exactly as it stands there, on a tiny model with random weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def block(language: str, containing: str) -> str:
    text = README.read_text(encoding="utf-8")
    found: str
    [found] = [
        code for code in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if containing in code
    ]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the README's config file and a model at `path/to/model`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["[UNK]", "a", "long", "document", ",", "then", "question"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model_folder = tmp_path / "path" / "to" / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(model_folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(model_folder)
    (tmp_path / "cache.yaml").write_text(block("yaml", "tiers:"), encoding="utf-8")
    return tmp_path


def test_the_example_loads_in_a_second_process_what_the_first_computed(folder: Path) -> None:
    code = block("python", "CachedGenerator")

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, second = run(), run()
    assert "num_loaded_tokens=0" in first
    assert "num_loaded_tokens=400" in second
    assert "{'local': 400}" in second
    assert first.splitlines()[0] == second.splitlines()[0]
