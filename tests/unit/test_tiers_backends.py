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


class Failing(Store):
    @property
    def capabilities(self) -> Capabilities:
        raise RuntimeError("no driver")


class Claiming(Store):
    """Offers whatever the test says."""

    claim = Capabilities()

    @property
    def capabilities(self) -> Capabilities:
        return self.claim


def prepare(*tiers: dict[str, object]) -> list[str]:
    registry = Registry()
    for backend_class in (Store, Shared, Shelf, Vague, Failing, Claiming):
        spec = BackendSpec(backend_class.__name__.lower(), "tests:Class", API)
        registry.add(spec, backend_class)
    config = load_config({"tiers": [{"name": f"t{n}", **tier} for n, tier in enumerate(tiers)]})
    return [f"{tier.where} {tier.config.name} {tier.resident}" for tier in prepare_tiers(config, registry)]


def test_tiers_are_prepared_in_the_configs_order_and_memory_tiers_known() -> None:
    tiers: list[dict[str, object]] = [
        {"backend": "shelf", "capacity": "1MiB"},
        {"backend": "store", "capacity": "1MiB"},
        {"backend": "shared"},
    ]
    assert prepare(*tiers) == ["tiers[0] t0 True", "tiers[1] t1 False", "tiers[2] t2 False"]


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
        ({"backend": "vague"}, PluginError, r"^tiers\[1\]: backend 'vague' of tier 't1' .*: a NoneType"),
        (
            {"backend": "failing"},
            PluginError,
            r"^tiers\[1\]: backend 'failing' of tier 't1' can't say what it offers: RuntimeError: no driver$",
        ),
    ],
)
def test_what_cant_be_prepared_is_one_error_that_names_its_place(
    tier: dict[str, object], error: type[LMCacheError], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare({"backend": "shared"}, tier)


def test_two_memory_tiers_are_refused_by_name() -> None:
    shelf: dict[str, object] = {"backend": "shelf", "capacity": "1MiB"}
    with pytest.raises(ConfigError, match="'t0' and 't1' both keep frames in this process's memory"):
        prepare(shelf, shelf)


def test_a_memory_tier_behind_another_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[1\]: tier 't1' .* the first: move it before 't0'$"):
        prepare({"backend": "shared"}, {"backend": "shelf", "capacity": "1MiB"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("medium", "tape"),
        ("delete", "yes"),
        ("range_min", 0),
        ("devices", ["cpu"]),
        ("devices", frozenset()),
        ("max_value_bytes", -1),
        ("max_batch", 0),
        ("max_in_flight", -3),
        ("max_in_flight", None),
        ("stat_cost_s", float("nan")),
    ],
)
def test_capabilities_that_make_no_sense_are_the_plugins_fault_and_name_the_field(
    monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    monkeypatch.setattr(Claiming, "claim", Capabilities(**{"shared": True, field: value}))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=rf"^tiers\[0\]: backend .* of tier 't0' .*: {field} is "):
        prepare({"backend": "claiming"})


def test_an_error_about_a_tier_of_a_file_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("tiers:\n  - name: a\n    backend: store\n    options:\n      path: /x\n      paht: /y\n")
    registry = Registry()
    registry.add(BackendSpec("store", "tests:Class", API), Store)
    with pytest.raises(ConfigError, match=r"cache\.yaml, line 6: tiers\[0\]\.options\.paht: unknown key"):
        prepare_tiers(load_config(file), registry)
