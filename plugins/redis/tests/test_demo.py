"""`lmcache-core demo` over cpu → redis, with a tiny model: a second process computes no shared prefix."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from click.testing import CliRunner

from lmcache_core.cli.demo_messages import QUESTIONS
from lmcache_core.cli.main import main
from lmcache_core.config import load_config

from .servers import require
from .sites import Site
from .tiers import fresh_namespace

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiers" / "redis.yaml"


def save_model(folder: Path) -> None:
    """A tiny Llama whose tokenizer makes a token of each word of the demo."""
    from tiny_models import llama
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lmcache_core.cli import demo_worker

    words = sorted(set(re.findall(r"\w+|[^\w\s]+", demo_worker.document_text() + " ".join(QUESTIONS))))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[UNK]", *words])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    llama(vocab_size=len(words) + 1).save_pretrained(folder)


def test_a_second_process_loads_the_document_from_redis(tmp_path: Path) -> None:
    site = Site(require("redis"))
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    [shared] = [tier for tier in config["tiers"] if tier["backend"] == "redis"]
    shared["options"] |= site.options(fresh_namespace())
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    save_model(tmp_path / "model")
    options = ["--model", tmp_path / "model", "--dir", tmp_path / "demo", "--config", tmp_path / "tiers.yaml"]
    result = CliRunner().invoke(main, ["demo", *map(str, options), "--repeats", "1", "--max-new-tokens", "6"])
    assert result.exit_code == 0, result.output
    assert "are identical: 6 of 6" in result.output
    assert f"after SIGKILL, from {shared['name']}: first token in" in result.output
    rows = [line for line in result.output.splitlines() if re.search(r"\brestarted\b", line)]
    assert len(rows) == len(QUESTIONS)
    for row in rows:
        loaded, computed = (
            int(number.replace(",", "")) for number in re.findall(r"restarted +([\d,]+) +([\d,]+)", row)[0]
        )
        assert loaded > 2000
        assert computed < 64, "the shared prefix was computed again"


def test_the_example_is_a_config_as_it_stands() -> None:
    config = load_config(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))
    assert [tier.backend for tier in config.tiers] == ["cpu", "redis"]
