from __future__ import annotations

import json
import re
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from lmcache_core import registry as registry_package
from lmcache_core.cli import config as config_command
from lmcache_core.cli import explain as explain_command
from lmcache_core.cli import plugins as plugins_command
from lmcache_core.cli.main import main
from lmcache_core.errors import BackendUnavailable, ConfigError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.registry import BackendSpec, PluginInfo, PluginState, Registry
from lmcache_core.storage.contract import (
    API,
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    Outcome,
    Status,
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    refuse: str = ""


class Shelf(Backend[Options]):
    """Holds nothing; opens unless told to refuse."""

    config_class = Options
    opened: list[Path] = []  # noqa: RUF012 (cleared by the fixture)

    def __init__(self, config: Options) -> None:
        self._config = config

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="file", delete=True, scan=False)

    def open(self, host: Host) -> None:
        if self._config.path == Path("/forbidden"):
            raise ConfigError("path /forbidden: choose a directory that you can write to")
        if self._config.refuse:
            raise BackendUnavailable(self._config.refuse)
        self.opened.append(self._config.path)

    def close(self) -> None: ...

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        self.stat_many([item.key for item in items], call)

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        self.stat_many([item.key for item in items], call)

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index in range(len(keys)):
            call.done(index, Outcome(status=Status.MISS))

    def stats(self) -> BackendStats:
        return BackendStats()


class Fragile(Shelf):
    def __init__(self, config: Options) -> None:
        raise ZeroDivisionError("no luck")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    found.add(BackendSpec("shelf", "tests:Shelf", API), Shelf)
    found.add(BackendSpec("fragile", "tests:Fragile", API), Fragile)
    for module in (registry_package, config_command, plugins_command):
        monkeypatch.setattr(module, "discover", lambda: found)
    Shelf.opened.clear()
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, arguments, terminal_width=200)


def write(text: str) -> str:
    Path("cache.yaml").write_text(text)
    return "cache.yaml"


def one_tier(backend: str = "shelf", options: str = "{path: /x}", capacity: str = "1MiB") -> str:
    return f"tiers:\n  - {{name: a, backend: {backend}, capacity: {capacity}, options: {options}}}\n"


GOOD = one_tier()


def test_a_good_file_is_ok_and_its_chain_is_shown(run: Callable[..., Result]) -> None:
    result = run("config", "check", write(GOOD))
    assert (result.exit_code, result.output) == (0, "cache.yaml: ok: a (shelf)\n")
    assert Shelf.opened == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiers: []\n", "cache.yaml, line 1: tiers: expected at least 1 entry"),
        (
            one_tier(backend="shelff"),
            "cache.yaml, line 2: tiers[0].backend: no installed plugin offers a backend named 'shelff'; did",
        ),
        (
            one_tier(options="{pathh: /x}"),
            "cache.yaml, line 2: tiers[0].options.pathh: unknown key; did you mean 'path'?",
        ),
        (
            one_tier(backend="fragile"),
            "cache.yaml, line 2: tiers[0]: backend 'fragile' of tier 'a' can't be built: ZeroDivisionError",
        ),
        (
            one_tier(capacity="null"),
            "cache.yaml, line 2: tiers[0].capacity: tier 'a' needs a bound on its bytes, such as `capacity",
        ),
    ],
)
def test_one_line_names_the_file_the_place_and_the_fault(
    run: Callable[..., Result], text: str, expected: str
) -> None:
    result = run("config", "check", write(text))
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {expected}")
    assert result.output.count("\n") == 1


def test_a_missing_file_is_an_error_without_traceback(run: Callable[..., Result]) -> None:
    result = run("config", "check", "no.yaml")
    assert (result.exit_code, result.output) == (1, "Error: no.yaml: no such file\n")


def test_open_proves_that_each_tier_opens(run: Callable[..., Result]) -> None:
    result = run("config", "check", "--open", write(GOOD))
    assert (result.exit_code, result.output) == (0, "cache.yaml: ok: a (shelf), all opened\n")
    assert Shelf.opened == [Path("/x")]


def test_open_names_the_tier_that_does_not_and_why(run: Callable[..., Result]) -> None:
    text = GOOD + "  - {name: b, backend: shelf, capacity: 1MiB, options: {path: /y, refuse: broken wire}}\n"
    result = run("config", "check", "--open", write(text))
    assert result.exit_code == 1
    assert "cache.yaml, line 3: tiers[1]: can't be opened: " in result.output
    assert "broken wire" in result.output


def test_open_names_the_tier_whose_options_cant_work(run: Callable[..., Result]) -> None:
    result = run("config", "check", "--open", write(one_tier(options="{path: /forbidden}")))
    expected = (
        "Error: cache.yaml, line 2: tiers[0]: path /forbidden: choose a directory that you can write to\n"
    )
    assert (result.exit_code, result.output) == (1, expected)


def check_in_a_process_of_its_own(file: Path, text: str) -> str:
    """What `config check --open` prints on failing, log lines included."""
    file.write_text(text)
    code = "from lmcache_core.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "config", "check", "--open", file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (
            ("kv", "kv"),
            "can't be opened: .*by this process\\); another tier .* uses the same path: give each",
        ),
        (("kv", "kv/shard-000"), "path .*/kv/shard-000 lies inside .*/kv, .*: give each a directory of"),
        (("kv/b", "kv"), "path .*/kv/b lies inside .*/kv, .*: give each a directory of its own"),
        (("kv", "/proc/kv"), "path /proc/kv: no files can be kept there .*; choose a directory on a disk"),
    ],
)
def test_open_says_once_which_path_cannot_be_a_tiers(tmp_path: Path, paths: Sequence[str], says: str) -> None:
    tiers = [
        f"  - {{name: {name}, backend: disk, capacity: 1MiB, options: {{path: {path}}}}}"
        for name, path in zip("ab", paths, strict=True)
    ]
    output = check_in_a_process_of_its_own(tmp_path / "cache.yaml", "\n".join(["tiers:", *tiers]))
    assert re.match(f"Error: cache.yaml, line 3: tiers\\[1\\]: {says}", output), output
    assert output.count("\n") == 1


def test_open_says_what_to_lower_when_there_is_not_so_much_memory(tmp_path: Path) -> None:
    text = "tiers: [{name: a, backend: cpu, capacity: 900000TiB}]\n"
    output = check_in_a_process_of_its_own(tmp_path / "cache.yaml", text)
    assert output.startswith("Error: cache.yaml: 921600000.5 GiB of frame memory can't be mapped (")
    assert "lower `memory.staging`, or the `capacity` of the tier" in output


def test_the_schema_is_printed_as_json(run: Callable[..., Result]) -> None:
    assert json.loads(run("config", "schema").output)["required"] == ["tiers"]


def test_plugins_are_listed_and_a_broken_one_fails_the_command(
    run: Callable[..., Result], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("plugins").exit_code == 0
    broken = PluginInfo(
        name="late", distribution="d", version="2", api=None, state=PluginState.BROKEN, cause="no [lib]"
    )
    monkeypatch.setattr(registry, "_plugins", [*registry._plugins, broken])
    result = run("plugins")
    lines = result.output.splitlines()
    assert lines[0].split() == ["name", "version", "api", "state", "cause"]
    assert lines[1].split() == ["fragile", "-", "1.0", "ok"]
    assert lines[2].split() == ["late", "2", "-", "broken", "no", "[lib]"]
    assert result.exit_code == 1


def test_no_plugin_at_all_says_how_to_get_one(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins_command, "discover", Registry)
    result = run("plugins")
    assert result.exit_code == 0
    assert "pip install lmcache-core-NAME" in result.output
    assert "\nKV is moved by " in result.output


def test_a_plugins_command_is_listed_and_run_and_cant_replace_one_of_ours(
    run: Callable[..., Result], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = click.Command("greet", callback=lambda: click.echo("hello"), help="Says hello.")
    theirs = click.Command("config", callback=lambda: click.echo("replaced"))
    monkeypatch.setattr(registry, "_commands", [greet, theirs])
    assert re.search(r"greet +Says hello\.", run("--help").output)
    assert run("greet").output == "hello\n"
    assert "replaced" not in run("config", "schema").output


def test_a_command_that_two_plugins_offer_is_that_of_neither(
    run: Callable[..., Result], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_commands", [click.Command("greet"), click.Command("greet")])
    result = run("greet")
    assert (result.exit_code, result.output) == (
        1,
        "Error: 2 plugins offer a command 'greet': uninstall all but one\n",
    )
    assert run("--help").output.count("greet") == 1


def test_an_unknown_command_is_refused(run: Callable[..., Result]) -> None:
    assert "No such command 'confog'. Did you mean 'config'?" in run("confog").output
    assert "Did you mean" not in run("zzz").output
    assert "No such option" in run("--confog").output


def test_the_command_of_a_plugin_that_cannot_be_used_says_why(
    run: Callable[..., Result], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = PluginInfo(
        name="late", distribution="d", version="2", api=None, state=PluginState.BROKEN, cause="no lib"
    )
    monkeypatch.setattr(registry, "_plugins", [*registry._plugins, broken])
    result = run("late", "run")
    assert (result.exit_code, result.output) == (
        1,
        "Error: the plugin 'late' can't be used (broken): no lib\n",
    )
    assert "No such command 'shelf'" in run("shelf").output  # a backend without one


def test_an_error_of_ours_in_any_command_ends_without_traceback(
    run: Callable[..., Result], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConfigError("the reason")

    monkeypatch.setattr(registry, "_commands", [click.Command("fail", callback=fail)])
    result = run("fail")
    assert (result.exit_code, result.output) == (1, "Error: the reason\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give either --prompt or --tokens"),
        (("--prompt", "a", "--tokens", "cache.yaml"), "give either --prompt or --tokens"),
        (("--prompt", "a"), "--prompt needs --model"),
        (("--prompt", "\udcff", "--model", "."), "--prompt is not text"),
        (("--prompt", "a", "--model", ".", "--dtype", "foo"), "'foo' is not one of 'auto', 'float32'"),
        (("--tokens", "cache.yaml"), "cache.yaml: not a list of token ids"),
    ],
)
def test_explain_asks_for_what_it_needs(
    run: Callable[..., Result], arguments: tuple[str, ...], expected: str
) -> None:
    result = run("explain", "--config", write(GOOD), *arguments)
    assert result.exit_code != 0
    assert expected in result.output


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"[1, 2, -5]", b"[4294967296]", b'["a"]', b"{}", b"[[1]]", b"[" * 100_000],
    ids=["binary", "negative", "too large", "text", "a mapping", "a list in it", "lists without end"],
)
def test_a_file_that_holds_no_token_ids_is_one_error(run: Callable[..., Result], content: bytes) -> None:
    Path("tokens").write_bytes(content)
    result = run("explain", "--config", write(GOOD), "--tokens", "tokens")
    assert result.exit_code == 1
    assert result.output.startswith("Error: tokens: not a list of token ids: ")


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2\n3", "\ufeff[1, 2, 3]"])
def test_token_files_may_be_json_or_words(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    assert explain_command._read_tokens(file) == array("i", [1, 2, 3])


def test_explain_says_that_nothing_was_ever_stored(
    run: Callable[..., Result], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("lmcache_core.engine.explain"), "discover", lambda: registry)
    Path("tokens").write_text(" ".join(map(str, range(600))))
    result = run("explain", "--config", write(GOOD), "--tokens", "tokens")
    assert result.exit_code == 1
    assert result.output.startswith("No tier holds any chunk of any model.")
    assert "  a: up, 0 entries, 0 bytes" in result.output
