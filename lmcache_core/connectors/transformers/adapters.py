"""LoRA adapters inside a model: which are in force, and the fingerprint of their weights.

PEFT isn't imported: its tuner layers are known by the attributes they all have (peft 0.17 to 0.21).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmcache_core.connectors.transformers.tensors import tensor_bytes
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import Value, encode, parameters_fingerprint

AdapterState: TypeAlias = tuple[object, ...]
"""What decides which adapters act, layer by layer; cheap to take and to compare."""


class Adapters:
    """The LoRA layers of `base`. Takes none of them over: others may switch adapters at any time.

    Raises:
        UnsupportedModel: adapters whose effect on KV can't be told from their weights.
    """

    def __init__(self, model: torch.nn.Module, base: PreTrainedModel) -> None:
        for config in (getattr(model, "peft_config", None) or {}).values():
            if getattr(config, "is_prompt_learning", False):
                raise UnsupportedModel("prompt tuning puts tokens before the prompt that have no ids")
        self._layers: list[tuple[str, Any]] = []
        for name, module in base.named_modules():
            if hasattr(module, "original_module"):
                raise UnsupportedModel(f"{name} is replaced by an adapter (modules_to_save): merge it first")
            if hasattr(module, "adapter_layer_names") and hasattr(module, "merged_adapters"):
                _check_layer(name, module)
                self._layers.append((name, module))
        self._known: dict[AdapterState, bytes] = {}

    def owns(self, tensor_name: str) -> bool:
        """Whether this parameter (named as in the base model) belongs to an adapter."""
        return any(
            tensor_name.startswith(f"{name}.{container}.")
            for name, layer in self._layers
            for container in layer.adapter_layer_names
        )

    def base_name(self, module_name: str) -> str | None:
        """What this module is called in the model without adapters; None for one that only adapters have."""
        for name, _ in self._layers:
            if module_name == name:
                return None
            if module_name.startswith(name + "."):
                inner = module_name.removeprefix(name + ".")
                if inner != "base_layer" and not inner.startswith("base_layer."):
                    return None
        return module_name.replace(".base_layer.", ".").removesuffix(".base_layer")

    def changes_weights(self) -> bool:
        """Whether the next forward writes to the weights: PEFT takes merged adapters out when disabled."""
        return any(layer.disable_adapters and layer.merged_adapters for _, layer in self._layers)

    def state(self) -> AdapterState:
        return tuple(
            (
                tuple(layer.active_adapters),
                bool(layer.disable_adapters),
                tuple(layer.merged_adapters),
                tuple(sorted(layer.scaling.items())),
            )
            for _, layer in self._layers
        )

    def fingerprint(self) -> bytes:
        """32 bytes over the weights and scaling of the adapters in force; empty when none is.

        Adapters' names don't count, their order does. Merged ones are part of the weights by now.
        """
        state = self.state()
        if state not in self._known:
            self._known[state] = self._fingerprint()
        return self._known[state]

    def _fingerprint(self) -> bytes:
        tensors = list(self._tensors_in_force())
        if not tensors:
            return b""
        scaling: Value = [
            [name, [float(layer.scaling.get(adapter, 0.0)) for adapter in _in_force(layer)]]
            for name, layer in self._layers
        ]
        weights = parameters_fingerprint(
            (name, str(tensor.dtype), tensor.shape, tensor_bytes(name, tensor)) for name, tensor in tensors
        )
        return blake2b(encode([weights, scaling]), digest_size=32, person=b"lmcache-core l1").digest()

    def _tensors_in_force(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers:
            for place, adapter in enumerate(_in_force(layer)):
                for container in layer.adapter_layer_names:
                    held = getattr(layer, container)
                    if adapter not in held:
                        continue
                    item = held[adapter]
                    tensors = [("", item)] if isinstance(item, Tensor) else item.named_parameters()
                    for inner, tensor in tensors:
                        yield f"{name}.{container}.{place}.{inner}", tensor


def _in_force(layer: Any) -> list[str]:
    if layer.disable_adapters or layer.merged_adapters:
        return []
    return [adapter for adapter in layer.active_adapters if adapter in layer.scaling]


def _check_layer(name: str, layer: Any) -> None:
    if not {"lora_A", "lora_B"} <= set(layer.adapter_layer_names) or not hasattr(layer, "scaling"):
        raise UnsupportedModel(f"{name} has a {type(layer).__name__} adapter; only LoRA is supported")
    if variants := getattr(layer, "lora_variant", None):
        kinds = ", ".join(sorted({type(variant).__name__ for variant in variants.values()}))
        raise UnsupportedModel(f"{name} has a LoRA variant that can't be fingerprinted: {kinds}")
