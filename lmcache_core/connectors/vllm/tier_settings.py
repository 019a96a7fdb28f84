"""What a user sets in an entry of `secondary_tiers`, beside vLLM's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from lmcache_core.config import ByteSize, CacheConfig, TierConfig, parse_options
from lmcache_core.config.schema import MemoryConfig
from lmcache_core.config.types import Duration
from lmcache_core.errors import ConfigError

WHERE = "secondary_tiers, type lmcache-core"


class TierSettings(TierConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a tier in a cache's config, and these."""

    name: Annotated[str, Meta(description="Names the tier in messages.")] = "secondary"
    staging: Annotated[
        ByteSize,
        Meta(description="Memory for frames on their way between vLLM's CPU tier and this one."),
    ] = MemoryConfig().staging
    jobs: Annotated[
        int,
        Meta(ge=1, description="Transfers each way that may wait or run. One more has failed at once."),
    ] = 256
    job_deadline: Annotated[
        Duration,
        Meta(description="How long a transfer may take, its wait for others included; then it has failed."),
    ] = Duration("10s")
    fingerprint_cache: Annotated[
        str | None,
        Meta(description="Directory that remembers weight files' fingerprints, for quicker starts."),
    ] = None
    locality: Annotated[
        Literal["LOCAL", "REMOTE"] | None,
        Meta(description="Where the store is, for vLLM's `kv_load_tiers` filter of a request."),
    ] = None

    @property
    def fingerprint_folder(self) -> Path | None:
        return None if self.fingerprint_cache is None else Path(self.fingerprint_cache).expanduser()

    def cache_config(self, chunk_tokens: int) -> CacheConfig:
        """A cache of this one tier. Memory in front of it would be vLLM's CPU tier a second time."""
        return CacheConfig(
            tiers=[self], chunk_tokens=chunk_tokens, tails=False, memory=MemoryConfig(staging=self.staging)
        )


def read_tier_settings(options: Mapping[str, object]) -> TierSettings:
    """
    Raises:
        ConfigError: a key that is unknown or missing, or a value that isn't what it should be.
    """
    for key in ("promote", "write"):
        if key in options:
            raise ConfigError(f"{WHERE}: {key}: vLLM decides what moves between its tiers; leave it out")
    return parse_options(TierSettings, options, WHERE)
