"""`lmcache-core explain`: why a prompt isn't answered from the cache, or how much of it is."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmcache_core.cli.models import loaded_from
from lmcache_core.config import load_config
from lmcache_core.connectors import needs_extra

if TYPE_CHECKING:
    from torch.nn import Module

    from lmcache_core.engine.explain import Explanation, ModelFinding, PieceFinding
    from lmcache_core.identity import ModelRecord, Part

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("explain")
@click.option("--config", "config_file", required=True, type=_FILE, help="The cache's config file.")
@click.option("--prompt", help="The prompt's text; needs --model, whose tokenizer reads it.")
@click.option(
    "--tokens", "tokens_file", type=_FILE, help="Token ids: a JSON list, or separated by white space."
)
@click.option(
    "--model", "folder", type=_FOLDER, help="The model's folder: Transformers' own, or a GGUF file."
)
@click.option(
    "--dtype", default="auto", show_default=True, help="What the model computes in; part of its KV's name."
)
@click.option("--salt", default="", help="The tenant's salt, if the prompt was stored under one.")
def command(
    config_file: Path,
    prompt: str | None,
    tokens_file: Path | None,
    folder: Path | None,
    dtype: str,
    salt: str,
) -> None:
    """Says which model field, chunk or tier makes a prompt miss.

    Opens the config's tiers as any process would: a directory that a running engine owns shows as down.
    Without --model the tokens are looked up under every stored model. Exit code 1 unless something is held.
    """
    if (prompt is None) == (tokens_file is None):
        raise click.UsageError("give either --prompt or --tokens")
    if prompt is not None and folder is None:
        raise click.UsageError("--prompt needs --model, whose tokenizer turns the text into tokens")
    config = load_config(config_file)
    tokens = _read_tokens(tokens_file) if tokens_file is not None else array("i")
    model: ModelRecord | None = None
    part: Part | None = None
    if folder is not None:
        with needs_extra("transformers"):
            from lmcache_core.connectors.transformers import identify

            if prompt is not None:
                tokens = _tokenize(folder, prompt)
            model, part = identify(_load(folder, dtype), config.chunk_tokens)

    from lmcache_core.engine.explain import explain

    found = explain(config, tokens, model=model, part=part.digest if part else "", salt=salt.encode())
    for line in _lines(found):
        click.echo(line)
    if not any(finding.num_tokens for finding in found.models):
        raise SystemExit(1)


def _read_tokens(file: Path) -> array[int]:
    text = file.read_text(encoding="utf-8")
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
        return array("i", ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise click.ClickException(f"{file}: not a list of token ids: {error}") from error


def _gguf(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.gguf"))
    return {"gguf_file": files[0].name} if files and not (folder / "config.json").exists() else {}


def _tokenize(folder: Path, prompt: str) -> array[int]:
    from transformers import AutoTokenizer

    with loaded_from(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, **_gguf(folder))
    return array("i", tokenizer(prompt)["input_ids"])


def _load(folder: Path, dtype: str) -> Module:
    from transformers import AutoModelForCausalLM

    with loaded_from(folder):
        model: Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **_gguf(folder))
    return model


def _lines(found: Explanation) -> list[str]:
    lines = [found.verdict, "", "Tiers, nearest first:"]
    for tier in found.tiers:
        reason = f": {tier.reason}" if tier.reason else ""
        lines.append(
            f"  {tier.name}: {tier.state}, {tier.entries} entries, {tier.used_bytes:,} bytes{reason}"
        )
    for model in found.models:
        lines += ["", f"Model {model.record.key}{' (the one asked about)' if model.same else ''}:"]
        lines += _model_lines(model, found.num_tokens)
    return lines


def _model_lines(model: ModelFinding, num_tokens: int) -> list[str]:
    lines = [f"  holds {model.num_tokens} of {num_tokens} tokens"]
    lines += [f"  {d.field}: stored {d.theirs!r}, asked about {d.ours!r}" for d in model.differences]
    return lines + _piece_lines(model.pieces)


def _piece_lines(pieces: Sequence[PieceFinding]) -> list[str]:
    """One line for each run of pieces that the same tiers hold."""
    lines = []
    for tiers, run in groupby(pieces, key=lambda piece: piece.tiers):
        pieces_of_run = list(run)
        first, last = pieces_of_run[0], pieces_of_run[-1]
        held = f"in {', '.join(tiers)}" if tiers else "in no tier"
        lines.append(f"  tokens {first.first_token} to {last.first_token + last.num_tokens - 1}: {held}")
    return lines
