"""From the config's tiers to backends that could be opened: found, validated, built once as a proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.config import CacheConfig, TierConfig, parse_options
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.registry import Registry
from lmcache_core.storage import Backend, Capabilities, Resident
from lmcache_core.storage.checks import checked_capabilities


@dataclass(frozen=True, slots=True)
class PreparedTier:
    """One tier of the config whose backend can be built."""

    config: TierConfig
    where: str
    """Its place, for messages: `cache.yaml, line 7: tiers[1]`."""
    make: Callable[[], Backend[Any]]
    """Builds a new, unopened backend."""
    offers: Capabilities
    """What the backend offers at most, known before it is opened."""
    resident: bool
    """It keeps frames in this process's pool."""


def prepare_tiers(config: CacheConfig, registry: Registry) -> list[PreparedTier]:
    """Everything that can be checked about the tiers without opening one. No I/O but imports.

    Raises:
        ConfigError: no usable plugin offers a backend, an option is wrong, a bound is missing, or tiers
            don't go together; names the place in the config.
        PluginError: a backend can't be built, or doesn't say what it offers; names the tier.
    """
    prepared = [_prepare(config, position, registry) for position in range(len(config.tiers))]
    _check_together(config, prepared)
    return prepared


def _prepare(config: CacheConfig, position: int, registry: Registry) -> PreparedTier:
    tier = config.tiers[position]
    where = config.located(("tiers", position))
    backend = f"{where}: backend {tier.backend!r} of tier {tier.name!r}"
    try:
        backend_class = registry.load(tier.backend)
    except PluginError as error:
        raise ConfigError(config.located(("tiers", position, "backend"), str(error))) from error
    place = ("tiers", position, "options")
    options = parse_options(backend_class.config_class, tier.options, place, config.origin)

    def make() -> Backend[Any]:
        try:
            return backend_class(options)
        except ConfigError as error:
            raise ConfigError(config.located(place, str(error))) from error
        except Exception as error:  # recorded boundary: plugins are foreign code
            cause = f"{type(error).__name__}: {error}"
            raise PluginError(f"{backend} can't be built: {cause}") from error

    probe = make()
    try:
        offers = checked_capabilities(probe.capabilities, "its capabilities")
    except Exception as error:  # recorded boundary: plugins are foreign code
        cause = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{backend} can't say what it offers: {cause}") from error
    return PreparedTier(tier, where, make, offers, isinstance(probe, Resident))


def _check_together(config: CacheConfig, tiers: Sequence[PreparedTier]) -> None:
    residents = [tier for tier in tiers if tier.resident]
    if len(residents) > 1:
        names = " and ".join(repr(tier.config.name) for tier in residents)
        message = f"{names} both keep frames in this process's memory; leave one of them"
        raise ConfigError(config.located(("tiers",), message))
    if residents and residents[0] is not tiers[0]:
        raise ConfigError(
            f"{residents[0].where}: tier {residents[0].config.name!r} keeps frames in this process's memory, "
            f"so it has to be the first: move it before {tiers[0].config.name!r}"
        )
    for position, tier in enumerate(tiers):
        private = not (tier.offers.shared or tier.offers.self_evicting)
        if tier.config.capacity is None and private:
            message = f"tier {tier.config.name!r} needs a bound on its bytes, such as `capacity: 4GiB`"
            raise ConfigError(config.located(("tiers", position, "capacity"), message))
