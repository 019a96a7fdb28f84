"""From one tier of the config to its backend: found, its options validated, built, not yet opened."""

from __future__ import annotations

from typing import Any

from lmcache_core.config import TierConfig, parse_options
from lmcache_core.errors import LMCacheError, PluginError
from lmcache_core.registry import Registry
from lmcache_core.storage.contract import Backend


def build_backend(tier: TierConfig, position: int, registry: Registry) -> Backend[Any]:
    """Builds the backend of the tier at `position` in the config. No I/O, as the contract demands.

    Raises:
        ConfigError: an option is unknown, missing or ill-typed; names it as `tiers[1].options.path`.
        PluginError: no usable plugin offers the backend, or its class can't be built.
    """
    try:
        backend_class = registry.load(tier.backend)
    except PluginError as error:
        raise PluginError(f"tiers[{position}].backend: {error}") from error
    place = f"tiers[{position}].options"
    options = parse_options(backend_class.config_class, tier.options, place)
    try:
        return backend_class(options)
    except LMCacheError as error:
        raise type(error)(f"{place}: {error}") from error
    except Exception as error:  # recorded boundary: plugins are foreign code
        cause = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"tiers[{position}]: backend {tier.backend!r} could not be built: {cause}"
        ) from error
