"""Tiny Transformers models with random weights, and the plain way to generate with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,  # far from uniform logits, so that greedy tokens have no near ties
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def made(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The causal LM of `config` with weights drawn from `seed`, ready to generate without an end token."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return made(transformers.LlamaConfig(**{**SIZES, **changes}), seed=seed, dtype=dtype)


def gpt2(*, seed: int = 0) -> Any:
    return made(
        transformers.GPT2Config(
            vocab_size=128,
            n_positions=8192,
            n_embd=64,
            n_layer=2,
            n_head=4,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=None,
        ),
        seed=seed,
    )


def prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    drawn = torch.randint(3, 128, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


def greedy(model: Any, tokens: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
    """What Transformers' own `generate` gives for this prompt alone, with no cache of ours."""
    ids = torch.tensor([list(tokens)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return tuple(output[0, len(tokens) :].tolist())


def tiers(folder: Path | None = None, *, chunk_tokens: int = 64) -> dict[str, Any]:
    """A config: memory, and disk below `folder` where one is given."""
    listed: list[dict[str, Any]] = [{"name": "memory", "backend": "cpu", "capacity": "64MiB"}]
    if folder is not None:
        listed.append(
            {"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": str(folder)}}
        )
    return {"chunk_tokens": chunk_tokens, "memory": {"staging": "32MiB"}, "tiers": listed}
