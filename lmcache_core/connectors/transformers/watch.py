"""A watch over a model, that sees when it is no longer the one whose KV was named."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmcache_core.connectors.transformers.identity import effective_config
from lmcache_core.connectors.transformers.modules import global_interventions, interventions, settings_of
from lmcache_core.connectors.transformers.tensors import plain_tensors
from lmcache_core.errors import UnsupportedModel

_SAMPLE = 16
"""Elements of each tensor that the watch compares."""


class Watch:
    """Notices that a model's tensors, modules, settings, configuration or mode changed since it was made.

    Replaced or resized tensors, modules added, removed or replaced, forward hooks, changed attributes
    and fields of the configuration, and writes that autograd counts are always seen. Writes behind its
    back (`weight.data += delta`) are seen if they touch one of sixteen elements spread over the tensor,
    as a merged adapter or an optimiser's step does, or a token's embedding. One to two milliseconds.
    Thread-safe.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._settings: dict[type[torch.nn.Module], set[str]] = {}  # attributes' names
        self._plain: dict[type[torch.nn.Module], set[str]] = {}
        for module in model.modules():
            self._settings.setdefault(type(module), set()).update(settings_of(module))
            if plain := plain_tensors(module):
                names = {name.partition("[")[0] for name in plain}
                self._plain.setdefault(type(module), set()).update(names)
        self._samples: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self._tensors():
            self._samples.setdefault(tensor.dtype, []).append(_spread(tensor))
        weight = getattr(model.get_input_embeddings(), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:  # single rows are written where tokens are added
            self._samples.setdefault(weight.dtype, []).append(weight.detach()[:, 0])
        self._stamp = self._take()
        self._values = _sampled(self._samples)
        self._changed = False

    def changed(self) -> bool:
        """Whether the model is no longer what it was; once true, it stays true."""
        samples = self._samples
        if not self._changed and not (self._take() == self._stamp and self._same(samples)):
            self._changed = True
            # They would keep replaced weights and modules alive. A thread that compares goes on with its own.
            self._samples, self._stamp = {}, []
        return self._changed

    def _same(self, samples: dict[torch.dtype, list[Tensor]]) -> bool:
        now = _sampled(samples)
        return len(now) == len(self._values) and all(map(torch.equal, now, self._values))

    def _take(self) -> list[object]:
        taken: list[object] = [
            torch.is_autocast_enabled("cpu"),
            self._config(),
            *global_interventions(self._model),
        ]
        taken += [kind.forward for kind in self._settings]
        for module in self._model.modules():
            state = vars(module)
            taken += (module, state["training"])
            taken += map(state.get, self._settings.get(type(module), ()))
            if state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
                taken += interventions(module)
        taken += [
            (tensor.data_ptr(), tensor.shape, -1 if tensor.is_inference() else tensor._version)
            for tensor in self._tensors()
        ]
        return taken

    def _tensors(self) -> Iterator[Tensor]:
        for module in self._model.modules():
            for held in (module._parameters, module._buffers):
                for tensor in held.values():
                    if tensor is not None:
                        yield tensor
            if type(module) in self._plain:
                yield from plain_tensors(module, self._plain[type(module)]).values()

    def _config(self) -> object:
        try:
            return effective_config(self._model, torch.float32)  # the dtype is the tensors' own
        except UnsupportedModel as error:
            return str(error)


def _sampled(samples: dict[torch.dtype, list[Tensor]]) -> list[Tensor]:
    """As bytes, since a NaN isn't equal to itself. Means something only while the stamp is unchanged."""
    with torch.inference_mode():
        return [torch.cat(tensors).view(torch.uint8) for tensors in samples.values()]


def _spread(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
