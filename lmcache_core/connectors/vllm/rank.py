"""One rank's cache, made when vLLM hands over its KV tensors; found by whoever shares the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_core.config import CacheConfig
from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import Group, common_block_tokens
from lmcache_core.connectors.vllm.identity import WHOLE, group_name, in_order, model_record, rank_part
from lmcache_core.connectors.vllm.known_as import tell_rank
from lmcache_core.connectors.vllm.memory import Blocks, DeviceBlocks, blocks_of
from lmcache_core.connectors.vllm.settings import ConnectorSettings, cache_config
from lmcache_core.connectors.vllm.support import attention_groups, attention_specs
from lmcache_core.connectors.vllm.versions import block_contents
from lmcache_core.engine import CacheEngine
from lmcache_core.errors import ConfigError, UnsupportedModel
from lmcache_core.identity import ModelRecord, Part

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_lock = threading.Lock()  # guards the dictionary
_caches: dict[str, GroupedCache] = {}  # by vLLM's engine id; one rank a process


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker needs to move KV."""

    number: int
    """Among all ranks of the engine."""
    cache: GroupedCache
    blocks: Sequence[Blocks]
    """Of each of the cache's groups."""


def open_rank(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Tensor], settings: ConnectorSettings
) -> Rank:
    """Builds the cache over this rank's KV tensors, and makes it known in this process.

    Raises:
        UnsupportedModel: KV that can't be served; says why.
        ConfigError, PluginError: the tiers can't be built as configured.
    """
    if cache_here(vllm_config.kv_transfer_config.engine_id) is not None:
        raise UnsupportedModel(
            "this engine has one LMCacheCoreConnector already, which would answer for both: "
            "put the tiers of both into one config (engines that are given an engine_id need different ones)"
        )
    groups = attention_groups(kv_cache_config)
    blocks: list[Blocks] = []
    parts: list[Part] = []
    for names, group, spec in zip(
        own_layers(kv_cache_config, kv_caches), groups, attention_specs(kv_cache_config), strict=True
    ):
        nbytes = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
        memory, axes = blocks_of(
            [kv_caches[name] for name in names], kv_cache_config.num_blocks, group.block_tokens, nbytes
        )
        order = f"{block_contents(vllm_config, names, kv_caches[names[0]].device)} {axes}"
        alone = len(groups) == 1 and group.window is None
        name = WHOLE if alone else group_name(group.window, names)
        if isinstance(memory, DeviceBlocks):
            log.warning(
                "KV on %s: this has been tested on the CPU only; compare greedy answers with and without the "
                "connector before you rely on it",
                kv_caches[names[0]].device,
            )
        blocks.append(memory)
        parts.append(rank_part(vllm_config, spec, names, memory.block_nbytes, order, group=name))
    config = cache_config(settings, common_block_tokens(groups))
    model = model_record(vllm_config, config.chunk_tokens, settings.fingerprint_folder)
    cache = _open_cache(config, model, groups, parts)
    with _lock:
        _caches[vllm_config.kv_transfer_config.engine_id] = cache
    parallel = vllm_config.parallel_config
    number = parallel.rank % parallel.world_size
    tell_rank(vllm_config.kv_transfer_config.engine_id, number, model, parts, groups)
    return Rank(number, cache, blocks)


def cache_here(engine_id: str) -> GroupedCache | None:
    """The cache of a worker in this process, if it has one."""
    with _lock:
        return _caches.get(engine_id)


def close_rank(engine_id: str) -> None:
    """Closes the cache, which writes what waits, and forgets it. Idempotent."""
    with _lock:
        cache = _caches.pop(engine_id, None)
    if cache is not None:
        cache.close()


def own_layers(kv_cache_config: Any, kv_caches: Mapping[str, Tensor]) -> list[list[str]]:
    """Each group's layers that have KV of their own, in the model's order.

    A layer that reads another's KV has the same tensor, and comes after it in the model; groups share memory,
    but never a block.

    Raises:
        UnsupportedModel: a layer in no group, or a group without one.
    """
    left = set(kv_caches)
    found: list[list[str]] = []
    for group in kv_cache_config.kv_cache_groups:
        names = [name for name in group.layer_names if name in kv_caches]
        left.difference_update(names)
        own = {kv_caches[name].data_ptr(): name for name in reversed(in_order(names))}
        found.append(in_order(list(own.values())))
    if left or not all(found):
        raise UnsupportedModel(f"layers {sorted(left)} are in no group of vLLM's, or a group has no layer")
    return found


def _open_cache(
    config: CacheConfig, model: ModelRecord, groups: Sequence[Group], parts: Sequence[Part]
) -> GroupedCache:
    largest = max(parts, key=lambda part: part.num_layers * part.segment_nbytes(config.chunk_tokens))
    first = CacheEngine(config, model=model, part=largest)
    if not first.memory_tiers:
        first.close()
        raise ConfigError(
            "vLLM is only promised KV that is in memory: put a memory tier first, such as "
            "{name: cpu, backend: cpu, capacity: 8GiB}"
        )
    return GroupedCache(groups, [first if part is largest else first.beside(part) for part in parts])
