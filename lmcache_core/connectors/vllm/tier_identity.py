"""Whose KV vLLM's offload keys name: the model, the bytes of one chunk, and the scheme of the keys."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.connectors.vllm.identity import model_record
from lmcache_core.connectors.vllm.support import attention_groups, check_config
from lmcache_core.connectors.vllm.tier_settings import WHERE
from lmcache_core.connectors.vllm.versions import instruction_set, vllm_version
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import HostScheme, ModelRecord, Part

PAGE_NBYTES = 4096
INSTEAD = 'use "kv_connector": "LMCacheCoreConnector" in place of vLLM\'s OffloadingConnector'


@dataclass(frozen=True, slots=True)
class OffloadIdentity:
    """What the names of all chunks have in common."""

    model: ModelRecord
    part: Part
    """The bytes of one chunk, of all ranks, cut into as many equal segments as a rank has layers."""
    scheme: HostScheme

    @property
    def chunk_nbytes(self) -> int:
        return self.part.num_layers * self.part.segment_nbytes(self.model.chunk_tokens)


def offload_identity(spec: Any, row_nbytes: int, fingerprint_folder: Path | None) -> OffloadIdentity:
    """Of vLLM's `OffloadingSpec`, whose chunks lie in rows of `row_nbytes` in its CPU tier.

    Reads every byte of the weight files, unless they are a hub's or their fingerprint is remembered.

    Raises:
        UnsupportedModel: KV that can't be told apart; says why.
    """
    vllm_config, kv_cache_config = engine_configs(spec.config.engine_id)
    check_config(vllm_config)
    if getattr(vllm_config, "lora_config", None) is not None:
        raise UnsupportedModel(
            f"{WHERE}: vLLM names KV of LoRA adapters by their path here, not by their weights, so "
            f"other weights under one path would share it: {INSTEAD}, which reads their files"
        )
    groups = attention_groups(kv_cache_config)
    if len(groups) > 1 or groups[0].window is not None:
        kinds = ["full attention" if each.window is None else f"a window of {each.window}" for each in groups]
        raise UnsupportedModel(
            f"{WHERE}: one group of layers is kept here, of full attention, and vLLM makes these of this "
            f"model: {', '.join(kinds)}; {INSTEAD}, which keeps all of them"
        )
    if spec.config.kv_cache_layout is None:
        raise UnsupportedModel("this vLLM doesn't say in which layout the KV of a block lies")
    tokens = spec.tokens_per_block[0] * spec.blocks_per_chunk
    return OffloadIdentity(
        model=model_record(vllm_config, tokens, fingerprint_folder),
        part=_chunk_part(spec, vllm_config, row_nbytes, tokens),
        scheme=_scheme(vllm_config, spec.tokens_per_hash, tokens),
    )


def engine_configs(engine_id: str) -> tuple[Any, Any]:
    """vLLM's configuration and KV cache configuration of the engine that is being built.

    vLLM tells a tier the model's name and dtype only, which doesn't tell two models apart. It builds its
    tiers in a function that has both at hand, so they are looked for in our callers.

    Raises:
        UnsupportedModel: this vLLM builds its tiers elsewhere.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        vllm_config = frame.f_locals.get("vllm_config")
        kv_cache_config = frame.f_locals.get("kv_cache_config")
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        if kv_cache_config is not None and getattr(transfer, "engine_id", None) == engine_id:
            return vllm_config, kv_cache_config
    raise UnsupportedModel("this vLLM doesn't say for which model it builds its tiers")


def _chunk_part(spec: Any, vllm_config: Any, row_nbytes: int, chunk_tokens: int) -> Part:
    config = spec.config
    group, parallel = config.groups[0], config.parallel
    copies = 1 if spec.replicated_layout else parallel.world_size
    nbytes = config.worker_kv_bytes_per_block * copies * spec.blocks_per_chunk
    num_layers = len(group.layer_names)
    content_nbytes, rest = divmod(nbytes, num_layers * chunk_tokens)
    if rest or not 0 <= row_nbytes - nbytes < PAGE_NBYTES:
        raise UnsupportedModel(
            f"chunks of {nbytes} bytes in rows of {row_nbytes} are no {num_layers} layers of {chunk_tokens} "
            "tokens each"
        )
    order = " ".join(
        (
            f"{config.kv_cache_layout}{' canonical' if config.canonical_layout else ''}",
            _in_block_order(vllm_config, group.layer_names),
            config.model.dtype,
            f"{group.tokens_per_block}x{spec.blocks_per_chunk}",
            f"tp{parallel.tp_size} pp{parallel.pp_size}",
            "replicated" if spec.replicated_layout else f"ranks{copies}",
        )
    )
    return Part(
        layers=(0, num_layers),
        heads=(0, 1),
        content_format=f"vllm {vllm_version()} offload {order}",
        content_nbytes=content_nbytes,
    )


def _in_block_order(vllm_config: Any, layer_names: tuple[str, ...]) -> str:
    """What orders the bytes inside a block, beside the layout that vLLM names."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
        return f"{current_platform.device_type} {getattr(backend, 'name', backend)}"
    capability = torch.backends.cpu.get_cpu_capability()
    if all(name in vllm_config.compilation_config.static_forward_context for name in layer_names):
        return f"{instruction_set(vllm_config, layer_names)} {capability}"
    # The layers are in the workers' processes: they choose by dtype, sizes and these features.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if has_amx is None:
        raise UnsupportedModel("the instruction set that orders the bytes of a block is not known here")
    return f"amx{int(has_amx())} {capability}"


def _scheme(vllm_config: Any, hash_tokens: int, chunk_tokens: int) -> HostScheme:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    drawn = resolve_none_hash_seed(function) != seed  # at random, anew each time
    return HostScheme(
        algorithm=f"vllm {algorithm} of {hash_tokens} tokens",
        seed=None if drawn else seed,
        block_tokens=chunk_tokens,
    )
