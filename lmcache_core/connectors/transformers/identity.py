"""Whose KV it is: the model record of a loaded model, and what its configuration contributes."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lmcache_core.connectors.effective import effective_fields, rope_types
from lmcache_core.connectors.transformers.adapters import Adapters
from lmcache_core.connectors.transformers.tensors import named_tensors, tensor_bytes
from lmcache_core.connectors.transformers.workspace import KVShape
from lmcache_core.identity import ModelRecord, Part, Value, parameters_fingerprint
from lmcache_core.kernels import KVContent


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
    """What the configuration says about KV. The attention implementation doesn't count: it computes the
    same function."""
    fields = effective_fields(model.config.to_dict(), rope_types(model.config))
    return {**fields, "architecture": type(model).__qualname__, "kv_dtype": str(kv_dtype)}


def part_of(shape: KVShape) -> Part:
    """The whole model as one part: every layer and KV head."""
    content = KVContent(str(shape.dtype).removeprefix("torch."), shape.dim)
    return Part(
        layers=(0, shape.num_layers),
        heads=(0, shape.num_heads),
        content_format=content.text,
        content_nbytes=content.nbytes,
    )
