"""The host API of a Transformers model, in one place: how to call its forward and read its logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lmcache_core.errors import UnsupportedModel


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """The Transformers model itself: PEFT's wrapper is taken off (its adapters live inside the model).

    Raises:
        UnsupportedModel: it isn't a Transformers model.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)
    base = model if get_base_model is None else get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise UnsupportedModel(f"{type(base).__name__} is not a transformers PreTrainedModel")
    return base


class Forward:
    """Runs a causal LM over new tokens of a cache. Blocking; changes only the cache's layers.

    Raises:
        UnsupportedModel: the model's forward takes no cache (at construction).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        # Transformers 5.2x renamed `past_key_values` to `cache`; models outside the library may lag behind.
        names = [name for name in ("cache", "past_key_values") if name in parameters]
        if not names:
            raise UnsupportedModel(f"{type(model).__name__}.forward takes no KV cache")
        self.cache_argument = names[0]
        self._model: Any = model
        self._takes_positions = "position_ids" in parameters
        self._keeps_logits = "logits_to_keep" in parameters

    def __call__(
        self, tokens: Tensor, cache: DynamicCache, positions: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """Appends `tokens` `[rows, n]` to `cache`; returns the last token's logits `[rows, vocabulary]`.

        `positions` `[rows, n]` are places among a row's own tokens, None for those the model finds itself;
        `mask` `[rows, cached + n]` is 0 on padding, None without any.
        """
        arguments: dict[str, object] = {self.cache_argument: cache, "use_cache": True}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._takes_positions and positions is not None:
            arguments["position_ids"] = positions
        if self._keeps_logits:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._model(tokens, **arguments).logits[:, -1]
        return logits


def cache_of(model: PreTrainedModel, layers: list[Any]) -> DynamicCache:
    """A real `DynamicCache` of this model with these layers in place of its own."""
    cache = DynamicCache(config=model.config)
    cache.layers = layers
    return cache
