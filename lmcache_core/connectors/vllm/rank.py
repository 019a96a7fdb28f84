"""One rank's cache engine, made when vLLM hands over its KV tensors; found by whoever shares the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_core.connectors.vllm.identity import in_order, model_record, rank_part
from lmcache_core.connectors.vllm.settings import ConnectorSettings, cache_config
from lmcache_core.connectors.vllm.support import attention_spec
from lmcache_core.connectors.vllm.versions import instruction_set
from lmcache_core.engine import CacheEngine
from lmcache_core.errors import ConfigError, UnsupportedModel
from lmcache_core.kernels import OpaqueBlocks

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_lock = threading.Lock()  # guards the dictionary
_engines: dict[str, CacheEngine] = {}  # by vLLM's engine id; one rank a process


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker needs to move KV."""

    number: int
    """Among all ranks of the engine."""
    engine: CacheEngine
    blocks: OpaqueBlocks
    block_tokens: int


def open_rank(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Tensor], settings: ConnectorSettings
) -> Rank:
    """Builds the engine over this rank's KV tensors, and makes it known in this process.

    Raises:
        UnsupportedModel: KV that can't be served; says why.
        ConfigError, PluginError: the tiers can't be built as configured.
    """
    import torch

    spec = attention_spec(kv_cache_config)
    names = in_order(list(kv_caches))
    blocks = OpaqueBlocks([kv_caches[name] for name in names])
    if blocks.num_blocks != kv_cache_config.num_blocks or blocks.block_nbytes != spec.page_size_bytes:
        raise UnsupportedModel(
            f"vLLM keeps {kv_cache_config.num_blocks} blocks of {spec.page_size_bytes} bytes, its tensors "
            f"hold {blocks.num_blocks} of {blocks.block_nbytes}"
        )
    order = f"{instruction_set(vllm_config, names)} {torch.backends.cpu.get_cpu_capability()}"
    config = cache_config(settings, spec.block_size)
    engine = CacheEngine(
        config,
        model=model_record(vllm_config, config.chunk_tokens, settings.fingerprint_folder),
        part=rank_part(vllm_config, spec, names, blocks.block_nbytes, order),
    )
    if not engine.memory_tiers:
        engine.close()
        raise ConfigError(
            "vLLM is only promised KV that is in memory: put a memory tier first, such as "
            "{name: cpu, backend: cpu, capacity: 8GiB}"
        )
    with _lock:
        _engines[vllm_config.kv_transfer_config.engine_id] = engine
    log.info("KV of %s, part %s\n%s", vllm_config.model_config.model, engine.part, engine.stats())
    parallel = vllm_config.parallel_config
    return Rank(parallel.rank % parallel.world_size, engine, blocks, spec.block_size)


def engine_here(engine_id: str) -> CacheEngine | None:
    """The engine of a worker in this process, if it has one."""
    with _lock:
        return _engines.get(engine_id)


def close_rank(engine_id: str) -> None:
    """Closes the engine, which writes what waits, and forgets it. Idempotent."""
    with _lock:
        engine = _engines.pop(engine_id, None)
    if engine is not None:
        engine.close()
