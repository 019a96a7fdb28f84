"""KV events as vLLM carries them from its workers to its scheduler, and publishes them.

Imported only where they are wanted: it needs more of vLLM's insides than the connector does without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVConnectorKVEvents,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.kv_events import BlockEvents, News, Told


class NewsBatch(KVConnectorKVEvents):  # type: ignore[misc]
    """The news of one step, of one or more ranks.

    vLLM's own aggregator keeps what all ranks say in the same step. Ours don't write in step: what all hold
    is for `BlockEvents` to find.
    """

    def __init__(self, news: Iterable[News]) -> None:
        self._news = list(news)
        self._num_workers = 1

    def add_events(self, events: list[News]) -> None:
        self._news.extend(events)

    def aggregate(self) -> NewsBatch:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._num_workers += count

    def get_all_events(self) -> list[News]:
        return self._news

    def get_number_of_workers(self) -> int:
        return self._num_workers

    def clear_events(self) -> None:
        self._news = []


class Publisher:
    """The scheduler's side of KV events: from what the workers report to what vLLM publishes.

    Of a model whose layers attend in several ways, the events are of the first group that keeps every
    token's KV, and tell of what all such groups hold.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, groups: Sequence[Group], mediums: Mapping[str, str]
    ) -> None:
        """At least one of `groups` keeps every token's KV. `mediums` is tier → medium."""
        full = [index for index, group in enumerate(groups) if group.window is None]
        self._mediums = mediums
        self._group = full[0]
        self._block_tokens = groups[self._group].block_tokens
        spec = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec
        self._kind = get_kv_cache_spec_kind(spec).value
        self.blocks = BlockEvents(
            block_tokens=self._block_tokens,
            hash_tokens=resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1],
            num_holders=vllm_config.parallel_config.world_size * len(full),
            extra_keys=lambda request, first, end: generate_block_hash_extra_keys(request, first, end, 0)[0],
        )

    def heard(self, batch: object) -> None:
        if isinstance(batch, NewsBatch):
            self.blocks.heard(batch.get_all_events())

    def take(self) -> list[BlockStored | BlockRemoved]:
        return [self._event(told) for told in self.blocks.take()]

    def _event(self, told: Told) -> BlockStored | BlockRemoved:
        medium = self._mediums.get(told.tier, "network")
        hashes = [maybe_convert_block_hash(block) for block in told.blocks]
        place = {
            "medium": MEDIUM_CPU if medium == "memory" else MEDIUM_STORAGE,
            "locality": "REMOTE" if medium == "network" else "LOCAL",
            "ownership": told.tier,
            "group_idx": self._group,
        }
        if not told.stored:
            return BlockRemoved(block_hashes=hashes, **place)
        lora_id, lora_name = told.lora or (None, None)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if told.parent is None else maybe_convert_block_hash(told.parent),
            token_ids=list(told.tokens),
            block_size=self._block_tokens,
            lora_id=lora_id,
            lora_name=lora_name,
            extra_keys=to_event_extra_keys(told.extra_keys),
            kv_cache_spec_kind=self._kind,
            **place,
        )
