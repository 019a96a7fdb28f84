"""What a user sets in `kv_connector_extra_config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_core.config import CacheConfig, load_config, parse_options
from lmcache_core.config.types import Duration

log = logging.getLogger(__name__)


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's own settings. The tiers are configured in `config`."""

    config: Annotated[
        str | dict[str, object], Meta(description="Path of the cache's YAML file, or its content inline.")
    ]
    prefetch_deadline: Annotated[
        Duration,
        Meta(description="How long a request may wait for KV to come from slower tiers into memory."),
    ] = Duration("2s")
    prefetches: Annotated[
        int, Meta(ge=1, description="Requests whose KV is brought into memory at the same time, at most.")
    ] = 8
    fingerprint_cache: Annotated[
        str | None,
        Meta(description="Directory that remembers weight files' fingerprints, for quicker starts."),
    ] = None

    @property
    def fingerprint_folder(self) -> Path | None:
        return None if self.fingerprint_cache is None else Path(self.fingerprint_cache).expanduser()


def read_settings(extra_config: Mapping[str, object]) -> ConnectorSettings:
    """
    Raises:
        ConfigError: a key that is unknown or missing, or a value that isn't what it should be.
    """
    return parse_options(ConnectorSettings, extra_config, "kv_connector_extra_config")


def cache_config(settings: ConnectorSettings, block_tokens: int) -> CacheConfig:
    """The cache's config, its chunks rounded up to whole blocks of the engine, which is said in the log.

    Raises:
        ConfigError: the config can't be read or holds something that isn't understood.
    """
    config = load_config(settings.config)
    rounded = -(-config.chunk_tokens // block_tokens) * block_tokens
    if rounded == config.chunk_tokens:
        return config
    log.warning(
        "chunk_tokens is %d, no multiple of the engine's blocks of %d tokens: using %d",
        *(config.chunk_tokens, block_tokens, rounded),
    )
    changed = msgspec.structs.replace(config, chunk_tokens=rounded)
    changed.remember(config.origin)
    return changed
