"""Which models can be served: checks before attach, and a probe of what the model really does.

A configuration says what a model should do; the probe runs a few tokens through it and looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from lmcache_core.connectors.effective import PREFIX_ROPE_TYPES, rope_types
from lmcache_core.connectors.transformers.forward import Forward, cache_of
from lmcache_core.connectors.transformers.modules import check_modules
from lmcache_core.connectors.transformers.workspace import Batch, KVShape, Workspace
from lmcache_core.errors import UnsupportedModel

_PROBE_TOKENS = 24
_PROBE_PREFIX = 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative error (Frobenius) that rounding can explain in a few tokens' KV or logits."""


def check_model(model: PreTrainedModel) -> None:
    """Refuses what the configuration and the modules already tell.

    Raises:
        UnsupportedModel: with the reason.
    """
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder: its KV depends on more than the prefix")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModel(f"{name} takes more than text: token ids don't identify its prompts")
    if not _uses_dynamic_cache(model):
        raise UnsupportedModel(f"{name} doesn't generate with a DynamicCache")
    computing = (module for module in model.modules() if type(module).forward is not torch.nn.Module.forward)
    if any(module.training for module in computing):
        raise UnsupportedModel(f"{name} is in training mode (dropout): call model.eval() first")
    kinds = rope_types(config).union(*(_module_rope_types(module) for module in model.modules()))
    if foreign := sorted(kinds - PREFIX_ROPE_TYPES):
        raise UnsupportedModel(
            f"{name} uses RoPE of type {', '.join(foreign)}: its frequencies change with the total length, "
            f"so KV is not a function of the prefix (supported: {', '.join(sorted(PREFIX_ROPE_TYPES))})"
        )
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if reason := _layer_reason(layer):
            raise UnsupportedModel(f"{name}, layer {index}: {reason}")
    if getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedModel(f"{name} scales attention by a token's slot, which padding moves")
    check_modules(model)
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if devices != {"cpu"}:
        raise UnsupportedModel(f"{name} is on {', '.join(sorted(devices))}; only cpu models are supported")


def _uses_dynamic_cache(model: Any) -> bool:
    return bool(model.can_generate() and model._supports_default_dynamic_cache())


def _module_rope_types(module: torch.nn.Module) -> frozenset[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, Mapping):
        return frozenset(value for value in kind.values() if isinstance(value, str))
    return frozenset({kind}) if isinstance(kind, str) else frozenset()


def _layer_reason(layer: object) -> str:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "keeps a recurrent state (Mamba, convolution or linear attention), not KV of every token"
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "sliding-window or chunked attention: it drops the KV of older tokens"
    if isinstance(layer, DummyLayer):
        return "has no KV of its own (it shares another layer's, or has no attention)"
    if type(layer) is not DynamicLayer:
        return f"its cache is a {type(layer).__name__}, not a plain layer of keys and values"
    return ""


def probe(model: PreTrainedModel, forward: Forward) -> KVShape:
    """Runs a few tokens and checks what every later answer rests on.

    All layers fill plain K and V of one shape and dtype; positions count from 0; the KV of a prefix doesn't
    depend on what follows; and continuing from KV placed in a cache gives what computing it all gives, also
    beside padding.

    Raises:
        UnsupportedModel: with what was found.
    """
    try:
        with torch.inference_mode():
            return _probe(model, forward)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} fails on a few tokens and a DynamicCache: {error}") from error


def _probe(model: PreTrainedModel, forward: Forward) -> KVShape:
    name = type(model).__name__
    tokens = torch.arange(3, 3 + 7 * _PROBE_TOKENS, 7).remainder(int(model.config.vocab_size)).unsqueeze(0)
    positions = torch.arange(_PROBE_TOKENS).unsqueeze(0)
    whole = DynamicCache(config=model.config)
    logits = forward(tokens, whole, positions)
    computed: list[Any] = whole.layers
    shape = _shape(name, computed)
    tolerance = _TOLERANCE[shape.dtype]
    if _error(forward(tokens, DynamicCache(config=model.config), None), logits) > tolerance:
        raise UnsupportedModel(f"{name} doesn't count token positions from 0 by itself")

    prefix = DynamicCache(config=model.config)
    prefix_logits = forward(tokens[:, :_PROBE_PREFIX], prefix, positions[:, :_PROBE_PREFIX])
    shorter: list[Any] = prefix.layers
    for index, (short, long) in enumerate(zip(shorter, computed, strict=True)):
        for what, a, b in (("keys", short.keys, long.keys), ("values", short.values, long.values)):
            if _error(a, b[:, :, :_PROBE_PREFIX]) > tolerance:
                raise UnsupportedModel(f"{name}, layer {index}: {what} of a prefix depend on what follows")

    workspace = Workspace(shape)
    with workspace.batch([_PROBE_TOKENS], 0) as batch:
        _place(batch, 0, computed, _PROBE_PREFIX)
        layers = batch.row_layers(0, _PROBE_PREFIX)
        again = forward(tokens[:, _PROBE_PREFIX:], cache_of(model, layers), positions[:, _PROBE_PREFIX:])
        if not all(layer.in_place for layer in layers):
            raise UnsupportedModel(f"{name} takes its KV out of the cache it is given")
        if _error(again, logits) > tolerance:
            raise UnsupportedModel(f"{name}: continuing from cached KV gives other logits than computing it")

    lengths = [_PROBE_TOKENS - 1, _PROBE_PREFIX - 1]
    with workspace.batch(lengths, 1) as batch:
        for row, num_tokens in enumerate(lengths):
            _place(batch, row, computed, num_tokens)
        loaded = cache_of(model, batch.layers(batch.length))
        last = torch.tensor(lengths).unsqueeze(1)
        together = forward(tokens[0, lengths].unsqueeze(1), loaded, last, batch.mask(batch.length + 1))
        if max(_error(together[:1], logits), _error(together[1:], prefix_logits)) > tolerance:
            raise UnsupportedModel(f"{name}: padding before a prompt changes its logits")
    return shape


def _place(batch: Batch, row: int, computed: list[Any], num_tokens: int) -> None:
    """Copies the KV of the first tokens to where they lie in this row."""
    first, end = batch.padding[row], batch.padding[row] + num_tokens
    for (keys, values), layer in zip(batch.planes, computed, strict=True):
        keys[row, :, first:end].copy_(layer.keys[0, :, :num_tokens])
        values[row, :, first:end].copy_(layer.values[0, :, :num_tokens])


def _shape(name: str, layers: list[Any]) -> KVShape:
    for index, layer in enumerate(layers):
        if layer.keys is None:
            raise UnsupportedModel(f"{name}, layer {index}: a forward leaves its cache empty")
    found = {(tuple(t.shape), t.dtype) for layer in layers for t in (layer.keys, layer.values)}
    if len(found) != 1:
        numbers = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in sorted(found, key=str))
        raise UnsupportedModel(f"{name}: keys and values differ in shape or dtype between layers: {numbers}")
    shape, dtype = found.pop()
    if len(shape) != 4 or shape[0] != 1 or shape[2] != _PROBE_TOKENS:
        raise UnsupportedModel(f"{name}: keys of {_PROBE_TOKENS} tokens have shape {list(shape)}")
    if dtype not in _TOLERANCE:
        raise UnsupportedModel(f"{name}: KV of dtype {dtype}; supported are float32, bfloat16 and float16")
    return KVShape(num_layers=len(layers), num_heads=shape[1], dim=shape[3], dtype=dtype)


def _error(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
