"""KV caches of language models, kept in a chain of storage tiers.

Importing this package loads nothing heavy: every public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.config import CacheConfig as CacheConfig
    from lmcache_core.config import load_config as load_config
    from lmcache_core.connectors.transformers import CachedGenerator as CachedGenerator
    from lmcache_core.engine import CacheEngine as CacheEngine
    from lmcache_core.engine import EngineStats as EngineStats
    from lmcache_core.engine import KVSource as KVSource
    from lmcache_core.engine import KVTarget as KVTarget
    from lmcache_core.engine import LayerSource as LayerSource
    from lmcache_core.engine import LayerTarget as LayerTarget
    from lmcache_core.engine import LoadedLayer as LoadedLayer
    from lmcache_core.engine import LookupResult as LookupResult
    from lmcache_core.engine import Prefetch as Prefetch
    from lmcache_core.engine import RetrieveResult as RetrieveResult
    from lmcache_core.engine import StoreResult as StoreResult
    from lmcache_core.errors import ConfigError as ConfigError
    from lmcache_core.errors import LMCacheError as LMCacheError
    from lmcache_core.errors import PluginError as PluginError
    from lmcache_core.identity import ModelRecord as ModelRecord
    from lmcache_core.identity import Part as Part

__version__ = "0.1.0"

_HOME = {
    "CacheConfig": "lmcache_core.config",
    "CacheEngine": "lmcache_core.engine",
    "CachedGenerator": "lmcache_core.connectors.transformers",
    "ConfigError": "lmcache_core.errors",
    "EngineStats": "lmcache_core.engine",
    "KVSource": "lmcache_core.engine",
    "KVTarget": "lmcache_core.engine",
    "LMCacheError": "lmcache_core.errors",
    "LayerSource": "lmcache_core.engine",
    "LayerTarget": "lmcache_core.engine",
    "LoadedLayer": "lmcache_core.engine",
    "LookupResult": "lmcache_core.engine",
    "ModelRecord": "lmcache_core.identity",
    "Part": "lmcache_core.identity",
    "PluginError": "lmcache_core.errors",
    "Prefetch": "lmcache_core.engine",
    "RetrieveResult": "lmcache_core.engine",
    "StoreResult": "lmcache_core.engine",
    "load_config": "lmcache_core.config",
}
_EXTRA = {"CachedGenerator": "transformers"}
"""The extra that brings what a name needs beyond the core's own dependencies."""

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _EXTRA:
        from lmcache_core.connectors import needs_extra

        with needs_extra(_EXTRA[name]):
            value: object = getattr(import_module(home), name)
    else:
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
