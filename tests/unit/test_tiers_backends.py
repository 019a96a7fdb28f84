from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from lmcache_core.config import load_config
from lmcache_core.errors import ConfigError, LMCacheError, PluginError
from lmcache_core.memory import Hold, Lease
from lmcache_core.registry import BackendSpec, Registry
from lmcache_core.sdk import (
    API,
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    Outcome,
    Status,
    StorageKey,
)
from lmcache_core.tiers import prepare_tiers


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: Path = Path("/x")


class Store(Backend[Options]):
    """Built, never opened."""

    config_class = Options

    def __init__(self, config: Options) -> None:
        if config.path == Path("/refused"):
            raise ConfigError("path: choose another")
        if config.path == Path("/broken"):
            raise KeyError("path")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="file", delete=True)

    def open(self, host: Host) -> None:
        raise AssertionError("preparing opens nothing")

    def close(self) -> None: ...

    def put_many(self, items: Sequence[Item], call: Call) -> None: ...

    def get_many(self, items: Sequence[Item], call: Call) -> None: ...

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None: ...

    def stats(self) -> BackendStats:
        return BackendStats()


class Shared(Store):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shared=True)


class Shelf(Store):
    """A memory tier."""

    def adopt(self, key: StorageKey, hold: Hold) -> Outcome:
        return Outcome(status=Status.FULL)

    def borrow(self, key: StorageKey) -> Lease | None:
        return None

    def discard(self, key: StorageKey, hold: Hold) -> bool:
        return False


class Vague(Store):
    capabilities = None  # type: ignore[assignment]


def prepare(*tiers: dict[str, object]) -> list[str]:
    registry = Registry()
    for backend_class in (Store, Shared, Shelf, Vague):
        spec = BackendSpec(backend_class.__name__.lower(), "tests:Class", API)
        registry.add(spec, backend_class)
    config = load_config({"tiers": [{"name": f"t{n}", **tier} for n, tier in enumerate(tiers)]})
    return [f"{tier.where} {tier.config.name} {tier.resident}" for tier in prepare_tiers(config, registry)]


def test_tiers_are_prepared_in_the_configs_order_and_memory_tiers_known() -> None:
    tiers: list[dict[str, object]] = [
        {"backend": "store", "capacity": 1},
        {"backend": "shelf", "capacity": 1},
        {"backend": "shared"},
    ]
    assert prepare(*tiers) == ["tiers[0] t0 False", "tiers[1] t1 True", "tiers[2] t2 False"]


@pytest.mark.parametrize(
    ("tier", "error", "message"),
    [
        ({"backend": "stores"}, ConfigError, r"^tiers\[1\]\.backend: .*did you mean 'store'"),
        ({"backend": "store"}, ConfigError, r"^tiers\[1\]\.capacity: tier 't1' needs a bound"),
        ({"backend": "store", "options": {"paht": ""}}, ConfigError, r"^tiers\[1\]\.options\.paht: unknown"),
        (
            {"backend": "store", "options": {"path": "/refused"}},
            ConfigError,
            r"^tiers\[1\]\.options: path: choose",
        ),
        (
            {"backend": "store", "options": {"path": "/broken"}},
            PluginError,
            r"^tiers\[1\]: .*KeyError: 'path'",
        ),
        ({"backend": "vague"}, PluginError, r"^tiers\[1\]: backend 'vague': its capabilities are None"),
    ],
)
def test_what_cant_be_prepared_is_one_error_that_names_its_place(
    tier: dict[str, object], error: type[LMCacheError], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare({"backend": "shared"}, tier)


def test_two_memory_tiers_are_refused_by_name() -> None:
    shelf: dict[str, object] = {"backend": "shelf", "capacity": 1}
    with pytest.raises(ConfigError, match="'t0' and 't1' both keep frames in this process's memory"):
        prepare(shelf, shelf)
