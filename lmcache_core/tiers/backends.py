"""From the config's tiers to backends that could be opened: found, validated, built once as a proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.config import CacheConfig, TierConfig, parse_options
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.registry import Registry
from lmcache_core.storage import Backend, Capabilities, Resident


@dataclass(frozen=True, slots=True)
class PreparedTier:
    """One tier of the config whose backend can be built. `where` is its place: `tiers[1]`."""

    config: TierConfig
    where: str
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
        PluginError: a backend can't be built.
    """
    prepared = [_prepare(tier, f"tiers[{n}]", registry) for n, tier in enumerate(config.tiers)]
    _check_together(prepared)
    return prepared


def _prepare(tier: TierConfig, where: str, registry: Registry) -> PreparedTier:
    try:
        backend_class = registry.load(tier.backend)
    except PluginError as error:
        raise ConfigError(f"{where}.backend: {error}") from error
    options = parse_options(backend_class.config_class, tier.options, f"{where}.options")

    def make() -> Backend[Any]:
        try:
            return backend_class(options)
        except ConfigError as error:
            raise ConfigError(f"{where}.options: {error}") from error
        except Exception as error:  # recorded boundary: plugins are foreign code
            cause = f"{type(error).__name__}: {error}"
            raise PluginError(f"{where}: backend {tier.backend!r} can't be built: {cause}") from error

    probe = make()
    offers: object = probe.capabilities
    if not isinstance(offers, Capabilities):
        raise PluginError(f"{where}: backend {tier.backend!r}: its capabilities are {offers!r}")
    return PreparedTier(tier, where, make, offers, isinstance(probe, Resident))


def _check_together(tiers: Sequence[PreparedTier]) -> None:
    residents = [tier.config.name for tier in tiers if tier.resident]
    if len(residents) > 1:
        names = " and ".join(map(repr, residents))
        raise ConfigError(f"tiers: {names} both keep frames in this process's memory; leave one of them")
    for tier in tiers:
        private = not (tier.offers.shared or tier.offers.self_evicting)
        if tier.config.capacity is None and private:
            raise ConfigError(
                f"{tier.where}.capacity: tier {tier.config.name!r} needs a bound on its bytes, such as "
                "`capacity: 4GiB`"
            )
