"""A model's tensors and their bytes, for fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmcache_core.errors import UnsupportedModel

if TYPE_CHECKING:
    from typing_extensions import Buffer

_REGISTRIES = frozenset(vars(torch.nn.Module()))
"""Attributes in which PyTorch itself keeps a module's parameters, buffers, modules and hooks."""


def tensor_bytes(name: str, tensor: Tensor) -> Buffer:
    """The tensor's elements as flat bytes, row-major; a view where it is contiguous in host memory.

    Raises:
        UnsupportedModel: they can't be had (a meta tensor, or a quantised one with a layout of its own).
    """
    try:
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedModel(f"the bytes of {name} ({tensor.dtype}) can't be read: {error}") from error
    buffer: Buffer = array
    return buffer


def plain_tensors(module: torch.nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors that are attributes only, or in a list or dict that is one, of all or these `names`.

    Such as a vector that a wrapper adds: PyTorch lists neither it nor its changes.
    """
    state = vars(module)
    found = {}
    for name in state if names is None else names:
        value = None if name in _REGISTRIES else state.get(name)
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            found |= {f"{name}[{key}]": item for key, item in items if isinstance(item, Tensor)}
    return found


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers (persistent or not), what else a state dict holds, and plain attributes.

    Names are those of the model without adapters: PEFT's `.base_layer` is dropped.

    Raises:
        UnsupportedModel: the state dict holds something that isn't a tensor.
    """
    found: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    storages = {tensor.data_ptr() for tensor in found.values()}
    extra: Mapping[str, object] = model.state_dict()
    for name, value in extra.items():
        if not isinstance(value, Tensor):
            raise UnsupportedModel(f"{name} is a {type(value).__name__}: the state it stands for is unknown")
        if name not in found and value.data_ptr() not in storages:  # tied weights have two names
            found[name] = value
    for name, module in model.named_modules():
        found |= {f"{name}.{attribute}": tensor for attribute, tensor in plain_tensors(module).items()}
    for name, tensor in found.items():
        yield name.replace(".base_layer.", "."), tensor
