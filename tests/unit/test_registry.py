"""Discovery is tested on distributions as pip leaves them: a dist-info directory and modules on sys.path."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_core.errors import PluginError
from lmcache_core.registry import BackendSpec, PluginState, Registry
from lmcache_core.storage.contract import API, Backend

HOOK = """
from lmcache_core.registry import BackendSpec, hookimpl

@hookimpl
def lmcache_backends():
    return [BackendSpec({name!r}, {target!r}, {api!r}, {hint!r})]
"""

DRIVER = """
import msgspec
from lmcache_core.storage.contract import Backend

class Options(msgspec.Struct, frozen=True):
    path: str = ""

class Store(Backend[Options]):
    config_class = Options
    def __init__(self, config): pass
    def open(self, host): pass
    def close(self): pass
    def put_many(self, items, call): pass
    def get_many(self, items, call): pass
    def stat_many(self, keys, call): pass
    def stats(self): pass
    @property
    def capabilities(self): pass
"""

COMMAND = """
import click
from lmcache_core.registry import hookimpl

@hookimpl
def lmcache_commands():
    return [click.Command("greet", callback=lambda: click.echo("hello"))]
"""

REPORT = """
import json, sys
from lmcache_core.errors import PluginError
from lmcache_core.registry import discover

def attempt(call):
    try:
        return repr(call())
    except PluginError as error:
        return f"PluginError: {error}"

registry = discover()
drivers = sorted(name for name in sys.modules if name.startswith("zz_driver"))
heavy = sorted({"torch", "numpy"} & set(sys.modules))
row = lambda p: [p.name, p.distribution, p.version, p.api, p.state.value, p.cause]
names = sys.argv[1:]
print(json.dumps({
    "plugins": [row(p) for p in registry.plugins],
    "drivers": drivers,
    "heavy": heavy,
    "commands": [c.name for c in registry.commands],
    "backend": {name: attempt(lambda: registry.backend(name)) for name in names},
    "load": {name: attempt(lambda: registry.load(name)) for name in names},
    "checked": [row(p) for p in registry.checked()],
}))
"""


def install(site: Path, distribution: str, version: str, entry_points: str, **modules: str) -> None:
    """Writes what `pip install` would leave in site-packages."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[lmcache_core]\n{entry_points}\n")
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)


def hook(name: str, target: str = "zz_driver_good:Store", api: object = (1, 0), hint: str = "") -> str:
    return HOOK.format(name=name, target=target, api=api, hint=hint)


@dataclass
class Row:
    name: str
    distribution: str
    version: str
    api: list[int] | None
    state: str
    cause: str


@dataclass
class Found:
    """What a process with the distributions below discovers."""

    plugins: dict[str, list[Row]]
    checked: dict[str, list[Row]]
    drivers: list[str]
    heavy: list[str]
    commands: list[str]
    backend: dict[str, str]
    load: dict[str, str]


NAMES = ["good", "goot", "broken", "twice", "future", "nodriver", "notclass", "partial", "nothing", "ancient"]
NAMES += ["greeter", "silent", "redis"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    site = tmp_path_factory.mktemp("site-packages")
    install(site, "zz-good", "1.2", "good = zz_good", zz_good=hook("good"), zz_driver_good=DRIVER)
    install(site, "zz-broken", "0.1", "broken = zz_broken", zz_broken="raise RuntimeError('no such lib')")
    install(site, "zz-exits", "0.1", "exits = zz_exits", zz_exits="raise SystemExit(3)")
    install(site, "zz-gone", "0.1", "gone = zz_gone_module")
    install(site, "zz-empty", "0.1", "empty = zz_empty", zz_empty="value = 1")
    install(site, "zz-badspec", "0.1", "badspec = zz_badspec", zz_badspec=hook("Bad Name"))
    unknown_argument = hook("args").replace("def lmcache_backends():", "def lmcache_backends(colour):")
    install(site, "zz-args", "0.1", "args = zz_args", zz_args=unknown_argument)
    install(site, "zz-one", "1.0", "twice = zz_one", zz_one=hook("twice"))
    install(site, "zz-two", "2.0", "twice = zz_two", zz_two=hook("twice"))
    install(
        site, "zz-future", "9.0", "future = zz_future", zz_future=hook("future", api=(API[0], API[1] + 1))
    )
    install(site, "zz-ancient", "0.0", "ancient = zz_ancient", zz_ancient=hook("ancient", api=(0, 9)))
    hint = "pip install zz-driver"
    no_driver = hook("nodriver", "zz_driver_absent:Store", hint=hint)
    install(site, "zz-nodriver", "1.0", "nodriver = zz_nodriver", zz_nodriver=no_driver)
    no_hint = hook("silent", "zz_driver_absent:Store")
    install(site, "zz-nohint", "1.0", "silent = zz_nohint", zz_nohint=no_hint)
    install(site, "zz-alias", "1.0", "alias = zz_alias", zz_alias=hook("named"))
    install(site, "zz-notclass", "1.0", "notclass = zz_notclass", zz_notclass=hook("notclass", "json:dumps"))
    partial = DRIVER.replace("    def get_many(self, items, call): pass\n", "")
    partial_hook = hook("partial", "zz_driver_partial:Store")
    install(site, "zz-part", "1.0", "partial = zz_part", zz_part=partial_hook, zz_driver_partial=partial)
    install(site, "zz-command", "1.0", "greeter = zz_command", zz_command=COMMAND)
    script = f"import sys; sys.path.insert(0, {str(site)!r})\n{REPORT}"
    done = subprocess.run(
        [sys.executable, "-c", script, *NAMES], capture_output=True, text=True, timeout=60, check=True
    )
    report = json.loads(done.stdout)
    for table in ("plugins", "checked"):
        rows: dict[str, list[Row]] = {}
        for fields in report[table]:
            rows.setdefault(fields[0], []).append(Row(*fields))
        report[table] = rows
    return Found(**report)


def test_a_good_plugin_is_found_with_its_version_and_api(found: Found) -> None:
    assert found.plugins["good"] == [Row("good", "zz-good", "1.2", [1, 0], "ok", "")]
    assert "zz_driver_good:Store" in found.backend["good"]


def test_discovery_imports_no_driver_and_nothing_heavy(found: Found) -> None:
    assert found.drivers == []
    assert found.heavy == []


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("broken", "RuntimeError: no such lib; reinstall or upgrade zz-broken"),
        ("exits", "SystemExit: 3; reinstall or upgrade zz-exits"),
        ("gone", "ModuleNotFoundError: No module named 'zz_gone_module'"),
        ("empty", "it implements no lmcache_core hook"),
        ("badspec", "ValueError: backend name 'Bad Name'"),
        ("args", "colour"),
        ("alias", "its entry point is named 'alias' but offers 'named': they must have the same name"),
        ("ancient", "written for contract 0.9, this core speaks"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_cause(found: Found, name: str, cause: str) -> None:
    [row] = found.plugins[name]
    assert row.state == "broken"
    assert cause in row.cause


def test_naming_a_broken_plugin_says_why_it_is_broken(found: Found) -> None:
    assert found.backend["broken"].startswith(
        "PluginError: plugin 'broken' can't be used (broken): RuntimeError: no such lib"
    )


def test_a_name_offered_twice_is_given_to_neither_and_both_are_named(found: Found) -> None:
    rows = found.plugins["twice"]
    assert [(row.distribution, row.state) for row in rows] == [
        ("zz-one", "duplicate"),
        ("zz-two", "duplicate"),
    ]
    assert "zz-one 1.0, zz-two 2.0: uninstall all but one" in found.backend["twice"]


def test_a_plugin_for_a_later_contract_is_too_new(found: Found) -> None:
    [row] = found.plugins["future"]
    assert row.state == "too-new"
    assert "upgrade lmcache-core" in found.backend["future"]


def test_an_unknown_name_is_answered_with_the_nearest_and_the_broken_ones(found: Found) -> None:
    message = found.backend["goot"]
    assert "no installed plugin offers a backend named 'goot'; did you mean 'good'?" in message
    assert "; installed backends: " in message
    assert "no such lib" not in message
    assert re.search(r"`lmcache-core plugins` lists \d+ more that can't be used", message)
    assert "pip install lmcache-core-goot" not in message  # the misspelt name is no package
    assert "did you mean" not in found.backend["nothing"].replace("'notclass'", "")


def test_a_name_that_no_package_can_have_is_not_put_into_a_command() -> None:
    with pytest.raises(PluginError, match="no installed plugin offers") as told:
        Registry().backend("x; rm -rf ~")
    assert "pip install" not in str(told.value)
    with pytest.raises(PluginError, match="`pip install lmcache-core-x`"):
        Registry().backend("x")


def test_a_name_that_is_only_a_little_alike_is_not_suggested(found: Found) -> None:
    assert "did you mean" not in found.backend["redis"]


def test_a_plugin_that_offers_no_backend_is_said_to_be_installed(found: Found) -> None:
    assert (
        "'greeter' (zz-command) is installed, but it offers no backend; installed" in found.backend["greeter"]
    )
    assert "pip install" not in found.backend["greeter"]


def test_what_fails_only_on_import_says_what_to_do_about_it(found: Found) -> None:
    for name, distribution in [("silent", "zz-nohint"), ("notclass", "zz-notclass"), ("partial", "zz-part")]:
        assert found.load[name].endswith(f"; reinstall or upgrade {distribution}, or tell its author")


def test_a_missing_driver_is_told_with_what_to_install(found: Found) -> None:
    assert (
        "ModuleNotFoundError: No module named 'zz_driver_absent'; try: pip install" in found.load["nodriver"]
    )


def test_a_target_that_is_no_backend_is_refused(found: Found) -> None:
    assert "json:dumps is not a subclass of lmcache_core.sdk.Backend" in found.load["notclass"]
    assert "zz_driver_partial:Store does not implement get_many" in found.load["partial"]


def test_the_checked_list_also_shows_what_fails_on_import(found: Found) -> None:
    assert found.plugins["nodriver"][0].state == "ok"
    assert found.checked["nodriver"][0].state == "broken"
    assert found.checked["good"][0].state == "ok"


def test_a_plugin_with_commands_only_is_listed_and_its_commands_found(found: Found) -> None:
    assert found.plugins["greeter"][0].state == "ok"
    assert "greet" in found.commands


class Store(Backend[int]):
    """Abstract: it implements nothing."""


def test_a_backend_added_by_hand_is_found_once() -> None:
    registry = Registry()
    spec = BackendSpec("mine", "json:dumps", API)
    registry.add(spec)
    assert registry.backend("mine") is spec
    assert [plugin.state for plugin in registry.plugins] == [PluginState.OK]
    with pytest.raises(PluginError, match="already registered"):
        registry.add(spec)


def test_a_class_added_by_hand_is_checked_at_once() -> None:
    with pytest.raises(PluginError, match="does not implement __init__, capabilities"):
        Registry().add(BackendSpec("mine", "json:dumps", API), Store)


def test_a_spec_for_a_later_contract_cant_be_added() -> None:
    with pytest.raises(PluginError, match="written for contract"):
        Registry().add(BackendSpec("mine", "json:dumps", (API[0] + 1, 0)))


@pytest.mark.parametrize(
    ("name", "target", "api"),
    [
        ("", "a:b", (1, 0)),
        ("Upper", "a:b", (1, 0)),
        ("ok", "a.b", (1, 0)),
        ("ok", "a:b", (1,)),
        ("ok", "a:b", "1.0"),
    ],
)
def test_a_malformed_spec_is_refused(name: str, target: str, api: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="backend"):
        BackendSpec(name, target, api)
