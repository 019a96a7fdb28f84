"""Whose KV it is: the model record of a loaded model, and what its configuration contributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import torch
from transformers import PreTrainedModel

from lmcache_core.connectors.transformers.adapters import Adapters
from lmcache_core.connectors.transformers.support import rope_types
from lmcache_core.connectors.transformers.tensors import named_tensors, tensor_bytes
from lmcache_core.connectors.transformers.workspace import KVShape
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import ModelRecord, Part, Value, parameters_fingerprint
from lmcache_core.kernels import KVContent

_WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "transformers_version", "torchscript", "id2label", "label2id", "problem_type"),
        *("return_dict", "output_hidden_states", "output_attentions", "use_cache", "task_specific_params"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("initializer_range", "initializer_factor", "attention_dropout", "chunk_size_feed_forward"),
        *("tie_word_embeddings", "pretraining_tp", "vocab_size", "finetuning_task", "dtype", "torch_dtype"),
    }
)
"""Config fields that don't change what KV a token gets: names, outputs, training, token roles. All
others count, so a field we don't know can only cost a miss."""


def model_record(
    model: PreTrainedModel, adapters: Adapters, shape: KVShape, chunk_tokens: int
) -> ModelRecord:
    """Reads every byte of the loaded weights and buffers (about a second a gigabyte and core).

    Raises:
        UnsupportedModel: weights that can't be read, or a configuration that can't be said.
    """
    tensors = (
        (name, str(tensor.dtype), tensor.shape, tensor_bytes(name, tensor))
        for name, tensor in named_tensors(model)
        if not adapters.owns(name)
    )
    return ModelRecord(
        weights=parameters_fingerprint(tensors),
        config=effective_config(model, shape.dtype),
        chunk_tokens=chunk_tokens,
    )


def effective_config(model: PreTrainedModel, kv_dtype: torch.dtype) -> dict[str, Value]:
    """What the configuration says about KV, in plain types; unset fields are left out.

    `max_position_embeddings` counts only where a RoPE type may read it. The attention implementation
    doesn't: it computes the same function.
    """
    config: dict[str, Value] = {"architecture": type(model).__qualname__, "kv_dtype": str(kv_dtype)}
    for name, value in model.config.to_dict().items():
        if name in _WITHOUT_EFFECT or name.startswith("_") or value is None:
            continue
        if name == "max_position_embeddings" and rope_types(model.config) == {"default"}:
            continue
        config[name] = _plain(value, name)
    return config


def part_of(shape: KVShape) -> Part:
    """The whole model as one part: every layer and KV head."""
    content = KVContent(str(shape.dtype).removeprefix("torch."), shape.dim)
    return Part(
        layers=(0, shape.num_layers),
        heads=(0, shape.num_heads),
        content_format=content.text,
        content_nbytes=content.nbytes,
    )


def _plain(value: object, where: str) -> Value:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Enum():
            return str(value)
        case torch.dtype():
            return str(value)
        case Mapping():
            return dict(_plain_items(value, where))
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case set() | frozenset():
            return sorted(str(item) for item in value)
        case _:
            raise UnsupportedModel(f"config field {where} is a {type(value).__name__}: it can't be compared")


def _plain_items(value: Mapping[object, object], where: str) -> Iterator[tuple[str, Value]]:
    for key, item in value.items():
        if item is not None:
            yield str(key), _plain(item, f"{where}.{key}")
