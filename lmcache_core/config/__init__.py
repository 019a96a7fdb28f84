"""The config file: its schema, loading with errors that help, and values with units."""

from lmcache_core.config.types import ByteSize, Duration

__all__ = ["ByteSize", "Duration"]
