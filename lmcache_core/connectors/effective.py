"""What a model's configuration says about its KV, for every host engine that reads Hugging Face configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import Value

PREFIX_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""RoPE types whose frequencies don't depend on how long the sequence has become."""

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


def rope_types(config: object) -> frozenset[str]:
    """The RoPE types a config names, over all layer types and under old and new field names."""
    return frozenset(
        kind
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(parameters := getattr(config, name, None), Mapping)
        for kind in _kinds(parameters)
    )


def effective_fields(fields: Mapping[str, object], rope: frozenset[str]) -> dict[str, Value]:
    """The fields of a config that count, in plain types; unset ones are left out.

    `max_position_embeddings` counts only where a RoPE type may read it.

    Raises:
        UnsupportedModel: a field that can't be compared.
    """
    return {
        name: _plain(value, name)
        for name, value in fields.items()
        if has_effect(name)
        and not name.startswith("_")
        and value is not None
        and not (name == "max_position_embeddings" and rope == {"default"})
    }


def has_effect(name: str) -> bool:
    """Whether a field of this name may change what KV a token gets."""
    return name not in _WITHOUT_EFFECT


def _kinds(parameters: Mapping[str, object]) -> Iterator[str]:
    for name in ("rope_type", "type"):
        if isinstance(kind := parameters.get(name), str):
            yield kind
    for inner in parameters.values():
        if isinstance(inner, Mapping):
            yield from _kinds(inner)


def _plain(value: object, where: str) -> Value:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Enum():
            return str(value)
        case Mapping():
            return dict(_plain_items(value, where))
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case set() | frozenset():
            return sorted(str(item) for item in value)
        case _ if type(value).__module__ == "torch":  # a dtype
            return str(value)
        case _:
            raise UnsupportedModel(f"config field {where} is a {type(value).__name__}: it can't be compared")


def _plain_items(value: Mapping[object, object], where: str) -> Iterator[tuple[str, Value]]:
    for key, item in value.items():
        if item is not None:
            yield str(key), _plain(item, f"{where}.{key}")
