"""Whose KV it is: the model record of a loaded model, and what its configuration contributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import transformers
from transformers import PreTrainedModel

from lmcache_core.connectors.effective import effective_fields, rope_types
from lmcache_core.connectors.transformers.adapters import Adapters
from lmcache_core.connectors.transformers.modules import module_settings
from lmcache_core.connectors.transformers.tensors import named_tensors, tensor_bytes
from lmcache_core.connectors.transformers.workspace import KVShape
from lmcache_core.identity import ModelRecord, Part, Value, parameters_fingerprint
from lmcache_core.identity.tokens import Memory
from lmcache_core.kernels import KVContent


def model_record(
    model: PreTrainedModel, adapters: Adapters, shape: KVShape, chunk_tokens: int
) -> ModelRecord:
    """Reads every byte of the loaded weights and buffers (about a second a gigabyte and core).

    What the modules are otherwise (`module_settings`) counts as weights, too.

    Raises:
        UnsupportedModel: weights that can't be read, or a configuration or code that can't be said.
    """
    tensors: Iterator[tuple[str, str, Sequence[int], Memory]] = (
        (name, str(tensor.dtype), tensor.shape, tensor_bytes(name, tensor))
        for name, tensor in named_tensors(model)
        if not adapters.owns(name)
    )
    modules = (
        (f"{name}()", "module", (len(settings),), settings)
        for name, settings in module_settings(model, adapters)
    )
    return ModelRecord(
        weights=parameters_fingerprint(chain(tensors, modules)),
        config=effective_config(model, shape.dtype),
        chunk_tokens=chunk_tokens,
    )


def effective_config(model: PreTrainedModel, kv_dtype: torch.dtype) -> dict[str, Value]:
    """What the configuration says about KV, to this release of Transformers: another may have mended a model.

    The attention implementation doesn't count: it computes the same function.
    """
    fields = effective_fields(model.config.to_dict(), rope_types(model.config))
    return {
        **fields,
        "architecture": type(model).__qualname__,
        "kv_dtype": str(kv_dtype),
        "library": f"transformers {transformers.__version__}",
    }


def part_of(shape: KVShape) -> Part:
    """The whole model as one part: every layer and KV head."""
    content = KVContent(str(shape.dtype).removeprefix("torch."), shape.dim)
    return Part(
        layers=(0, shape.num_layers),
        heads=(0, shape.num_heads),
        content_format=content.text,
        content_nbytes=content.nbytes,
    )
