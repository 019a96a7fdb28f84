"""The config file: its schema, loading with errors that help, and values with units."""

from lmcache_core.config.loading import load_config, parse_options
from lmcache_core.config.reference import Option, json_schema, option_table
from lmcache_core.config.schema import BreakerConfig, CacheConfig, MemoryConfig, TierConfig
from lmcache_core.config.types import ByteSize, Duration

__all__ = [
    "BreakerConfig",
    "ByteSize",
    "CacheConfig",
    "Duration",
    "MemoryConfig",
    "Option",
    "TierConfig",
    "json_schema",
    "load_config",
    "option_table",
    "parse_options",
]
