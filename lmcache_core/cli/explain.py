"""`lmcache-core explain`: why a prompt isn't answered from the cache, or how much of it is."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmcache_core.cli.models import loaded_from
from lmcache_core.config import CacheConfig, load_config
from lmcache_core.connectors import needs_extra
from lmcache_core.identity.tokens import token_bytes

if TYPE_CHECKING:
    from torch.nn import Module

    from lmcache_core.engine.explain import Explanation, ModelFinding, PieceFinding
    from lmcache_core.identity import FieldDifference

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
    "--dtype",
    type=click.Choice(("auto", "float32", "bfloat16", "float16")),
    default="auto",
    show_default=True,
    help="What the model computes in; part of its KV's name.",
)
@click.option(
    "--vllm-log",
    "vllm_log",
    type=_FILE,
    help="What vLLM printed: asks for the KV of the engine that was started last in it.",
)
@click.option("--lora", "adapter", help="With --vllm-log: the name of the request's adapter.")
@click.option("--salt", default="", help="The tenant's salt, if the prompt was stored under one.")
def command(
    config_file: Path,
    prompt: str | None,
    tokens_file: Path | None,
    folder: Path | None,
    dtype: str,
    vllm_log: Path | None,
    adapter: str | None,
    salt: str,
) -> None:
    """Says which model field, chunk or tier makes a prompt miss.

    Opens the config's tiers as any process would: a directory that a running engine owns shows as down.
    The KV asked about is that of a vLLM (--vllm-log), or of Transformers (--model); without either the tokens
    are looked up under every stored model. Exit code 1 unless something is held of what was asked about.
    """
    if (prompt is None) == (tokens_file is None):
        raise click.UsageError("give either --prompt or --tokens")
    if prompt is not None and folder is None:
        raise click.UsageError("--prompt needs --model, whose tokenizer turns the text into tokens")
    if prompt is not None and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise click.UsageError("--prompt is not text in the encoding of this terminal")
    if adapter is not None and vllm_log is None:
        raise click.UsageError("--lora needs --vllm-log, which says what the adapter is known by")
    config = load_config(config_file)
    tokens = _read_tokens(tokens_file) if tokens_file is not None else array("i")
    if folder is not None and prompt is not None:
        with needs_extra("transformers"):
            tokens = _tokenize(folder, prompt)
    if vllm_log is not None:
        lines, held = _ask_vllm(config, tokens, vllm_log, adapter, os.fsencode(salt))
    else:
        lines, held = _ask(config, tokens, folder, dtype, os.fsencode(salt))
    for line in lines:
        click.echo(line)
    if not held:
        raise SystemExit(1)


def _ask(
    config: CacheConfig, tokens: array[int], folder: Path | None, dtype: str, salt: bytes
) -> tuple[list[str], int]:
    """What to print, and the tokens held."""
    from lmcache_core.engine.explain import explain

    otherwise = {"no salt": (b"", b"")} if salt else {}
    if folder is None:
        found = explain(config, tokens, salt=salt)
    else:
        with needs_extra("transformers"):
            from lmcache_core.connectors.transformers import identify

            model, part = identify(_load(folder, dtype), config.chunk_tokens)
        found = explain(config, tokens, model=model, parts=[part], salt=salt, otherwise=otherwise)
    return [found.verdict, *_lines(found)], _held(found)


def _ask_vllm(
    config: CacheConfig, tokens: array[int], log: Path, adapter: str | None, salt: bytes
) -> tuple[list[str], int]:
    """As `_ask`, for every rank that the log tells of: each has its own part, and a directory of its own."""
    from lmcache_core.connectors.vllm.known_as import in_vllm_s_words, read_log
    from lmcache_core.engine.explain import explain

    known = read_log(log)
    found = {
        rank: explain(
            config,
            tokens,
            model=known.model,
            parts=[part for part, _ in known.ranks[rank]],
            starts=known.starts(rank),
            unit_tokens=known.block_tokens,
            salt=salt,
            lora=known.lora(adapter),
            otherwise=known.otherwise(adapter, salt),
        )
        for rank in sorted(known.ranks)
    }
    least = min(found, key=lambda rank: _held(found[rank]))
    lines = [found[least].verdict]
    for rank, each in found.items():
        if len(found) > 1:
            lines += ["", f"Rank {rank}: {each.verdict}"]
        lines += _lines(each, in_vllm_s_words)
    return lines, _held(found[least])


def _held(found: Explanation) -> int:
    """Of the model asked about; without one, of the one that holds most."""
    return found.models[0].num_tokens if found.models else 0


def _read_tokens(file: Path) -> array[int]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
        return array("i", token_bytes(ids))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # the last: of lists in lists
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


def _lines(found: Explanation, hint: Callable[[FieldDifference], str] = lambda field: "") -> list[str]:
    """`hint` names what a user sets that a field follows from."""
    lines = ["", "Tiers, nearest first:"]
    for tier in found.tiers:
        reason = f": {tier.reason}" if tier.reason else ""
        lines.append(
            f"  {tier.name}: {tier.state}, {tier.entries} entries, {tier.used_bytes:,} bytes{reason}"
        )
    for model in found.models:
        lines += ["", f"Model {model.record.key}{' (the one asked about)' if model.same else ''}:"]
        lines += _model_lines(model, found.num_tokens, hint)
    return lines


def _model_lines(
    model: ModelFinding, num_tokens: int, hint: Callable[[FieldDifference], str]
) -> Iterator[str]:
    yield f"  holds {model.num_tokens} of {num_tokens} tokens"
    yield from _difference_lines(model.differences, hint)
    for name, held in (model.otherwise or {}).items():
        yield f"  holds {held} under {name}"
    if model.other_part is not None:
        other = model.other_part
        yield f"  holds {other.num_tokens} in part {other.digest}, which isn't asked about:"
        yield from _difference_lines(other.differences, hint)
    yield from _piece_lines(model.pieces)


def _difference_lines(
    differences: Sequence[FieldDifference], hint: Callable[[FieldDifference], str]
) -> Iterator[str]:
    for each in differences:
        follows = f" (from {hint(each)})" if hint(each) else ""
        yield f"  {each.field}: stored {each.theirs!r}, asked about {each.ours!r}{follows}"


def _piece_lines(pieces: Sequence[PieceFinding]) -> Iterator[str]:
    """One line for each run of pieces that the same tiers hold."""
    for tiers, run in groupby(pieces, key=lambda piece: piece.tiers):
        pieces_of_run = list(run)
        first, last = pieces_of_run[0], pieces_of_run[-1]
        held = f"in {', '.join(tiers)}" if tiers else "in no tier"
        yield f"  tokens {first.first_token} to {last.first_token + last.num_tokens - 1}: {held}"
