"""The cache engine: the verbs a host engine calls."""

from lmcache_core.engine.engine import CacheEngine
from lmcache_core.engine.explain import Explanation, explain
from lmcache_core.engine.prefetch import Prefetch
from lmcache_core.engine.results import (
    EngineStats,
    KVSource,
    KVTarget,
    LayerSource,
    LayerTarget,
    LoadedLayer,
    LookupResult,
    RetrieveResult,
    StoreResult,
    TierStats,
)

__all__ = [
    "CacheEngine",
    "EngineStats",
    "Explanation",
    "KVSource",
    "KVTarget",
    "LayerSource",
    "LayerTarget",
    "LoadedLayer",
    "LookupResult",
    "Prefetch",
    "RetrieveResult",
    "StoreResult",
    "TierStats",
    "explain",
]
