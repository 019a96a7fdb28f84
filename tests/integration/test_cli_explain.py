from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lmcache_core.cli.main import main

PROMPT = "a long document " * 100
CONFIG = """\
tiers:
  - name: local
    backend: disk
    capacity: 64MiB
    options: {path: kv}
"""


def make_model(folder: Path, rope_theta: float = 10_000.0) -> Path:
    """A tiny model with its tokenizer; the same weights each time."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["[UNK]", "a", "long", "document"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Stores the prompt's KV on disk under one model; returns a way to ask about it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lmcache_core import CachedGenerator

    monkeypatch.chdir(tmp_path)
    Path("cache.yaml").write_text(CONFIG, encoding="utf-8")
    folder = make_model(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    with CachedGenerator(AutoModelForCausalLM.from_pretrained(folder), "cache.yaml") as generator:
        generator.generate(tokens, max_new_tokens=1)
        assert generator.flush(30.0)
    return lambda *arguments: CliRunner().invoke(main, ["explain", "--config", "cache.yaml", *arguments])


def test_a_folder_without_a_model_is_one_error(tmp_path: Path, explain: Callable[..., Result]) -> None:
    (tmp_path / "empty").mkdir()
    for asked in (["--prompt", PROMPT], ["--tokens", "ids"]):
        (tmp_path / "ids").write_text("1 2 3")
        result = explain("--model", "empty", *asked)
        assert result.exit_code == 1
        assert "empty holds no model with its tokenizer" in result.output


def test_explain_tells_a_hit_another_prompt_and_another_model_apart(
    tmp_path: Path, explain: Callable[..., Result]
) -> None:
    hit = explain("--model", "model", "--prompt", PROMPT)
    assert hit.stdout.startswith("It is a hit: 288 of 300 tokens are held.")
    assert "tokens 0 to 287: in local" in hit.stdout
    assert hit.exit_code == 0

    other_prompt = explain("--model", "model", "--prompt", "document " + PROMPT)
    assert other_prompt.stdout.startswith("No stored model holds the start of this request")
    assert other_prompt.exit_code == 1

    make_model(tmp_path / "other", rope_theta=500_000.0)
    other_model = explain("--model", "other", "--prompt", PROMPT)
    assert "Another model holds 288 of these tokens; this one differs from it in: " in other_model.stdout
    assert "rope_theta: stored 10000.0, asked about 500000.0" in other_model.stdout
    assert other_model.exit_code == 1

    salted = explain("--model", "model", "--prompt", PROMPT, "--salt", "a tenant")
    assert salted.stdout.startswith("288 of these tokens are held, but under no salt; 0 are under")
    assert salted.exit_code == 1
