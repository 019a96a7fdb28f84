"""What both sides count, as vLLM carries it to its log and to `/metrics`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_core.events import BroughtNear, Event, FrameRejected, Retrieved, Stored, StoreShed

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

COUNTERS: Mapping[str, str] = {
    "loaded_tokens": "Prompt tokens whose KV was loaded into vLLM's blocks, over all ranks.",
    "loaded_bytes": "Bytes of KV loaded into vLLM's blocks.",
    "load_seconds": "Time the workers spent loading.",
    "lost_tokens": "Tokens that were promised to vLLM and had to be computed after all.",
    "stored_tokens": "Tokens whose KV was newly taken.",
    "stored_bytes": "Bytes of KV newly taken.",
    "store_seconds": "Time the workers spent taking KV.",
    "prefetch_seconds": "Time it took to bring KV from slower tiers into memory.",
}
TIER_COUNTERS: Mapping[str, str] = {
    "hit_tokens": "Prompt tokens that were promised to vLLM, by the tier that they came from.",
    "prefetched_bytes": "Bytes that prefetches found, by the tier that they came from.",
    "shed_stores": "Chunks that a tier could not take.",
    "rejected_frames": "Stored chunks that turned out damaged, and were dropped.",
}
"""These have a label `tier`."""


def hit_sources(
    by_tier: Mapping[str, int], mediums: Mapping[str, str], num_tokens: int
) -> dict[CacheHitSource, int]:
    """A hit of `num_tokens` in vLLM's terms, from the tokens that each tier gave.

    vLLM counts what comes over a network from a store as unspecified.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # the versions that ask for this have it

    sources = {"memory": CacheHitSource.HOST, "file": CacheHitSource.DISK}
    counts: Counter[CacheHitSource] = Counter()
    for tier, count in by_tier.items():
        counts[sources.get(mediums.get(tier, ""), CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
    if counts.total() != num_tokens:  # vLLM has taken another hit than the one we know of
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_tokens} if num_tokens else {}
    return dict(counts)


class Tally:
    """An observer of one rank's engine, or the scheduler's; what it counted is taken once a step."""

    KINDS: tuple[type[Event], ...] = (Retrieved, Stored, StoreShed, FrameRejected, BroughtNear)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        match event:
            case Retrieved():
                self.add(
                    loaded_tokens=event.num_tokens, loaded_bytes=event.nbytes, load_seconds=event.seconds
                )
            case Stored():
                self.add(
                    stored_tokens=event.num_tokens, stored_bytes=event.nbytes, store_seconds=event.seconds
                )
            case StoreShed():
                self.add_of_tiers("shed_stores", {event.tier: 1})
            case FrameRejected():
                self.add_of_tiers("rejected_frames", {event.tier: 1})
            case BroughtNear():
                self.add(prefetch_seconds=event.seconds)
                self.add_of_tiers("prefetched_bytes", dict(event.bytes_by_tier))

    def add(self, **counts: float) -> None:
        with self._lock:
            self._counts.update(counts)

    def add_of_tiers(self, counter: str, counts: Mapping[str, int]) -> None:
        """Counts for one of `TIER_COUNTERS`."""
        self.add(**{f"{counter}/{tier}": count for tier, count in counts.items()})

    def take(self) -> ConnectorStats | None:
        """What was counted since the last time; None for nothing."""
        if not self._counts:  # usual: one read
            return None
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return ConnectorStats(data={name: count for name, count in counts.items() if count})


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval: `data` is {counter, or counter/tier: sum}."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters as Prometheus counters `vllm:lmcache_core_<name>_total`, one an engine (and tier)."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in COUNTERS.items():
            counter = self._counter(name, meaning, labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
        self._tier_counters = {
            name: self._counter(name, meaning, [*labelnames, "tier"])
            for name, meaning in TIER_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
                continue
            name, _, tier = name.partition("/")
            if name in self._tier_counters:
                self._tier_counters[name].labels(*self.per_engine_labelvalues[engine_idx], tier).inc(count)

    def _counter(self, name: str, meaning: str, labelnames: list[str]) -> Any:
        return self._counter_cls(
            name=f"vllm:lmcache_core_{name}", documentation=meaning, labelnames=labelnames
        )
