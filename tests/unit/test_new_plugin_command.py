from __future__ import annotations

import ast
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lmcache_core.cli import new_plugin
from lmcache_core.cli.main import main
from lmcache_core.registry import BackendSpec, PluginInfo, PluginState, Registry
from lmcache_core.storage.contract import API

INSTALLED = PluginInfo(
    name="taken", distribution="somebodys-plugin", version="2", api=None, state=PluginState.BROKEN, cause="x"
)


class Installed(Registry):
    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        return (INSTALLED,)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_plugin, "discover", Installed)
    return lambda *arguments: CliRunner().invoke(main, ["new-plugin", *arguments])


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_the_package_is_complete(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("card-box")
    assert result.exit_code == 0, result.output
    assert files(tmp_path / "lmcache-core-card-box") == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/lmcache_core_card_box/__init__.py",
        "src/lmcache_core_card_box/backend.py",
        "src/lmcache_core_card_box/config.py",
        "src/lmcache_core_card_box/driver.py",
        "src/lmcache_core_card_box/py.typed",
        "tests/test_conformance.py",
    }


def test_nothing_but_what_was_asked_for_is_made(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("card-box", "--dir", "deep/er").exit_code == 0
    assert os.listdir(tmp_path) == ["deep"]
    assert os.listdir(tmp_path / "deep" / "er") == ["lmcache-core-card-box"]


def test_the_package_names_its_backend_everywhere(run: Callable[..., Result], tmp_path: Path) -> None:
    run("card-box")
    project = tmp_path / "lmcache-core-card-box"
    pyproject = tomllib.loads((project / "pyproject.toml").read_text())
    assert pyproject["project"]["name"] == "lmcache-core-card-box"
    assert pyproject["project"]["entry-points"] == {"lmcache_core": {"card-box": "lmcache_core_card_box"}}
    module = ast.parse((project / "src/lmcache_core_card_box/backend.py").read_text())
    assert "CardBoxBackend" in [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    text = (project / "src/lmcache_core_card_box/__init__.py").read_text()
    assert f'BackendSpec("card-box", "lmcache_core_card_box.backend:CardBoxBackend", api={API})' in text


def test_the_longest_name_makes_a_spec_and_lines_of_bounded_length() -> None:
    name = "-".join(["x" * 9] * 4) + "y"
    assert len(name) == new_plugin.MAX_NAME_CHARS
    new_plugin.check_name(name)
    BackendSpec(name, f"{new_plugin._package(name)}.backend:XBackend", API)
    for path, text in new_plugin.render(name).items():
        assert "${" not in text.replace("${{", ""), path
        if path.suffix == ".py":
            ast.parse(text)


@pytest.mark.parametrize("path", ["driver.py", "config.py", "backend.py", "test_conformance.py", "README.md"])
def test_places_to_fill_in_are_marked(path: str) -> None:
    [text] = [text for file, text in new_plugin.render("card-box").items() if file.name == path]
    assert "FILL IN" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Mine", "'Mine' can't be a name: use a-z, 0-9 and single '-' between, a letter first"),
        ("my store", "'my store' can't be a name"),
        ("my_store", "'my_store' can't be a name"),
        ("my--store", "'my--store' can't be a name"),
        ("store-", "'store-' can't be a name"),
        ("9p", "'9p' can't be a name"),
        ("../evil", "'../evil' can't be a name"),
        ("/etc/evil", "'/etc/evil' can't be a name"),
        ("a.b", "'a.b' can't be a name"),
        ("store\n", r"'store\n' can't be a name"),
        ("ünïcode", "'ünïcode' can't be a name"),
        ("", "'' can't be a name"),
        ("$name", "'$name' can't be a name"),
        ("x" * 41, "the name has 41 characters: use at most 40"),
        ("class", "'class' is a keyword of Python: choose another name"),
        ("match", "'match' is a keyword of Python: choose another name"),
        ("null", "'null' means something else in a config file, which is YAML: choose another name"),
        ("none", "'none' means something else in a config file"),
        ("true", "'true' means something else in a config file"),
        ("false", "'false' means something else in a config file"),
        ("on", "'on' means something else in a config file"),
        ("off", "'off' means something else in a config file"),
        ("yes", "'yes' means something else in a config file"),
        ("no", "'no' means something else in a config file"),
        ("~", "'~' can't be a name"),
        ("test", "'test' makes classes that pytest takes for tests, as all that begins with 'test'"),
        ("test-store", "'test-store' makes classes that pytest takes for tests"),
        ("tests", "'tests' makes classes that pytest takes for tests"),
        ("shelve", "'shelve' is a module of Python itself, for which readers would take it: choose another"),
        ("sdk", "'sdk' belongs to lmcache-core itself: choose another name"),
        ("lmcache-core-mine", "give the name without 'lmcache-core-', which is put before it"),
        ("lmcache-core", "give the name without 'lmcache-core-', which is put before it"),
        ("taken", "somebodys-plugin is installed and has a plugin named 'taken': choose another name"),
        ("conformance", "'conformance' belongs to lmcache-core itself"),
    ],
)
def test_a_name_that_can_not_be_used_is_one_error_and_writes_nothing(
    run: Callable[..., Result], tmp_path: Path, name: str, said: str
) -> None:
    result = run("--", name)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert said in result.output
    assert len(result.output.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_module_of_that_name_is_refused(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "lmcache_core_shelf").mkdir(parents=True)
    (elsewhere / "lmcache_core_shelf" / "__init__.py").touch()
    monkeypatch.syspath_prepend(elsewhere)
    result = run("shelf")
    assert "a module lmcache_core_shelf is installed already" in result.output
    assert os.listdir(tmp_path) == ["elsewhere"]


def test_a_distribution_of_that_name_is_refused(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "elsewhere" / "lmcache_core_shelf-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: LMCache_core.shelf\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    result = run("shelf")
    assert result.output == (
        "Error: lmcache-core-shelf is installed already: choose another name, or uninstall it\n"
    )
    assert os.listdir(tmp_path) == ["elsewhere"]


@pytest.mark.parametrize("parent", ["sp ace;$(touch oops)", "it's", "-n", "two\nlines", "*"])
def test_the_line_that_leads_there_can_be_given_to_a_shell(
    run: Callable[..., Result], tmp_path: Path, parent: str
) -> None:
    result = run("shelf", "--dir", parent)
    start, end = result.output.index("  cd "), result.output.index("\n  pip install")
    shown = result.output[start:end]
    done = subprocess.run(["sh", "-c", f"{shown} && pwd"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / parent / 'lmcache-core-shelf'}\n"
    assert os.listdir(tmp_path) == [parent]


def test_an_empty_directory_is_filled(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "lmcache-core-shelf").mkdir()
    assert run("shelf").exit_code == 0
    assert "pyproject.toml" in files(tmp_path / "lmcache-core-shelf")


@pytest.mark.parametrize("what", ["directory", "file", "link"])
def test_what_is_there_is_never_touched(run: Callable[..., Result], tmp_path: Path, what: str) -> None:
    target = tmp_path / "lmcache-core-shelf"
    if what == "directory":
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    elif what == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = files(tmp_path)
    result = run("shelf")
    assert result.exit_code == 1
    assert "is there already and not an empty directory: remove it, or use --dir" in result.output
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["lmcache-core-shelf"]


def test_a_place_that_can_not_be_written_is_one_error_and_leaves_nothing(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "occupied").write_text("a file")
    result = run("shelf", "--dir", "occupied")
    assert result.exit_code == 1
    assert "Error: occupied/lmcache-core-shelf can't be made: " in result.output
    assert files(tmp_path) == {"occupied"}


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    name = "x" * 300  # longer than file systems take
    with pytest.raises(new_plugin.ConfigError, match="can't be made"):
        new_plugin.write({Path("first"): "written", Path(name): "not written"}, tmp_path / "target")
    assert os.listdir(tmp_path) == []
