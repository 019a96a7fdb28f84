"""`lmcache-core demo` over cpu → redis, with a tiny model: a second process computes no shared prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from click.testing import CliRunner, Result

from lmcache_core.cli.demo_messages import QUESTIONS
from lmcache_core.cli.main import main
from lmcache_core.config import load_config
from lmcache_core_conformance.network import free_ports

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


def run_demo(tmp_path: Path, options: Mapping[str, object]) -> Result:
    """Runs the command over the tiers of the example, with these options of its Redis."""
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    config["tiers"][1]["options"] |= options
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    save_model(tmp_path / "model")
    places = {"--model": "model", "--dir": "demo", "--config": "tiers.yaml"}
    arguments = [text for option, name in places.items() for text in (option, str(tmp_path / name))]
    return CliRunner().invoke(main, ["demo", *arguments, "--repeats", "1", "--max-new-tokens", "4"])


def test_a_second_process_loads_the_document_from_redis(tmp_path: Path) -> None:
    site = Site(require("redis"))
    result = run_demo(tmp_path, site.options(fresh_namespace()))
    assert result.exit_code == 0, result.output
    assert "are identical: 6 of 6" in result.output
    assert "after SIGKILL, from redis: first token in" in result.output
    rows = re.findall(r"restarted +([\d,]+) +([\d,]+)", result.output)
    assert len(rows) == len(QUESTIONS)
    for row in rows:
        loaded, computed = (int(number.replace(",", "")) for number in row)
        assert loaded > 2000
        assert computed < 64, "the shared prefix was computed again"


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    [port] = free_ports(1)
    result = run_demo(tmp_path, {"url": f"redis://127.0.0.1:{port}"})
    assert result.exit_code == 0, result.output
    assert (
        f"Tier redis could not be used: redis open: can't reach redis server 127.0.0.1:{port}"
        in result.output
    )


def test_the_example_is_a_config_as_it_stands() -> None:
    config = load_config(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))
    assert [tier.backend for tier in config.tiers] == ["cpu", "redis"]
