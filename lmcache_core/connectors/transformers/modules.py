"""What a model's modules are besides their tensors: classes and settings, and what was put in their way."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from hashlib import blake2b

import torch
import torch.nn.modules.module as module_globals
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lmcache_core.connectors.effective import has_effect
from lmcache_core.connectors.transformers.adapters import Adapters
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import Value, encode

_LIBRARIES = frozenset({"torch", "transformers"})
"""What their releases' code computes is what the configuration says; hooks of theirs only watch, or make
weights from parameters that are fingerprinted."""

_SETTINGS = (bool, int, float, str)

_IDLE = frozenset(
    {
        *("name_or_path", "loss_type", "training", "gradient_checkpointing"),
        *("max_seq_len_cached", "original_max_seq_len"),
    }
)
"""Settings without effect on KV, or with one only under the RoPE types that are refused."""


def interventions(module: torch.nn.Module) -> list[object]:
    """What runs before, after or in place of a module's own forward: KV then isn't what its weights say."""
    state = vars(module)
    found: list[object] = [
        hook
        for hooks in (state["_forward_pre_hooks"], state["_forward_hooks"])
        for hook in hooks.values()
        if _library(hook) not in _LIBRARIES
    ]
    forward = state.get("forward")
    if forward is not None:
        inner = getattr(forward, "_torchdynamo_orig_callable", forward)  # compiled, it is the same function
        if getattr(inner, "__func__", None) is not type(module).forward:
            found.append(forward)
    return found


def global_interventions(model: PreTrainedModel) -> list[object]:
    """Hooks on every module's forward, and attention or mask functions that others registered."""
    hooks = (module_globals._global_forward_pre_hooks, module_globals._global_forward_hooks)
    name = model.config._attn_implementation
    functions = (ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name))
    found = [*(hook for each in hooks for hook in each.values()), *filter(None, functions)]
    return [one for one in found if _library(one) not in _LIBRARIES]


def check_modules(model: PreTrainedModel) -> None:
    """Refuses a model whose forward others intervene in (steering, patches, sparse attention, offloading).

    Raises:
        UnsupportedModel: names the module and what was found.
    """
    everywhere = [("every module", found) for found in global_interventions(model)]
    places = [(name, found) for name, module in model.named_modules() for found in interventions(module)]
    for name, found in (*everywhere, *places):
        where, what = name or type(model).__name__, getattr(found, "__qualname__", found)
        raise UnsupportedModel(
            f"{where} has a forward hook, or another forward or attention ({what}): "
            "what it does to KV can't be told from weights and configuration"
        )


def settings_of(module: torch.nn.Module) -> dict[str, Value]:
    """A module's plain attributes that can change what it computes, such as `eps` or `scaling`."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _IDLE and has_effect(name) and _plain(value)
    }


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(type(item) in _SETTINGS for item in value)
    return type(value) in _SETTINGS


def module_settings(model: PreTrainedModel, adapters: Adapters) -> Iterator[tuple[str, bytes]]:
    """(name, description) of each module but adapters': class, settings, and the code of foreign classes.

    Raises:
        UnsupportedModel: a class of another library whose code can't be read.
    """
    digests: dict[str, bytes] = {}
    for name, module in model.named_modules():
        base_name = adapters.base_name(name)
        if base_name is not None:
            kind = type(module)
            # Two where the class's forward was patched.
            places = (kind.__module__, _module_of(kind.forward) or kind.__module__)
            for place in places:
                if place not in digests:
                    digests[place] = _code_digest(place, name or kind.__qualname__)
            code: Value = [[place, digests[place]] for place in places]
            yield base_name, encode([code, kind.__qualname__, settings_of(module)])


def _code_digest(python_module: str, used_by: str) -> bytes:
    """Of the source of classes that are no library's: their weights and names don't say what they do."""
    if python_module.partition(".")[0] in _LIBRARIES:
        return b""
    try:
        source = inspect.getsource(sys.modules[python_module])
    except (KeyError, OSError, TypeError) as error:
        raise UnsupportedModel(
            f"the code of {used_by} (Python module {python_module}) can't be read, and so not be told from "
            f"other code of that name: define it in a file ({error})"
        ) from error
    return blake2b(source.encode(errors="surrogatepass"), digest_size=32).digest()


def _library(hook: object) -> str:
    return _module_of(hook).partition(".")[0]


def _module_of(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None) or "")
