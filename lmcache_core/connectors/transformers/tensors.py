"""A model's tensors: their bytes for fingerprints, and a watch that sees when they change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmcache_core.errors import UnsupportedModel

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SAMPLE = 16
"""Elements of each tensor that the watch compares."""


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


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers (persistent or not) and what else a state dict holds, each name once.

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
    for name, tensor in found.items():
        yield name.replace(".base_layer.", "."), tensor


class Watch:
    """Notices that parameters, buffers or the mode of a model changed since it was made.

    Replaced or resized tensors, modules added or removed, and writes that autograd counts are always
    seen. Writes behind its back (`weight.data += delta`) are seen if they touch one of sixteen elements
    spread over the tensor, as a merged adapter or an optimiser's step does. About a millisecond.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._samples: dict[torch.dtype, list[Tensor]] = {}
        for tensor in _tensors(model):
            self._samples.setdefault(tensor.dtype, []).append(_spread(tensor))
        self._stamp = self._take()
        self._values = self._sampled()
        self._changed = False

    def changed(self) -> bool:
        """Whether the model is no longer what it was; once true, it stays true."""
        if not self._changed:
            self._changed = self._stamp != self._take() or not all(
                torch.equal(now, then) for now, then in zip(self._sampled(), self._values, strict=True)
            )
            if self._changed:
                self._samples.clear()  # they are views, which would keep replaced weights alive
        return self._changed

    def _take(self) -> list[object]:
        tensors: list[object] = [
            (tensor.data_ptr(), tensor.shape, -1 if tensor.is_inference() else tensor._version)
            for tensor in _tensors(self._model)
        ]
        return [self._model.training, torch.is_autocast_enabled("cpu"), *tensors]

    def _sampled(self) -> list[Tensor]:
        """As bytes, since a NaN isn't equal to itself. Means something only while `_take` is unchanged."""
        with torch.inference_mode():
            return [torch.cat(samples).view(torch.uint8) for samples in self._samples.values()]


def _tensors(model: PreTrainedModel) -> Iterator[Tensor]:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is not None:
                    yield tensor


def _spread(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
