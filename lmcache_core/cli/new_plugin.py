"""`lmcache-core new-plugin`: renders `plugin_template/` into a package that works and passes the suite."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from importlib.metadata import distributions, version
from pathlib import Path
from string import Template

import click

from lmcache_core.errors import ConfigError
from lmcache_core.registry import discover
from lmcache_core.storage.contract import API

TEMPLATE = Path(__file__).parent / "plugin_template"

MAX_NAME_CHARS = 40

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PREFIX = "lmcache-core-"
_RESERVED = frozenset({"conformance", "core", "kernels", "lmcache", "sdk"})
"""Distributions and modules that are, or may become, the project's own."""
_YAML_WORDS = frozenset({"false", "n", "no", "none", "null", "off", "on", "true", "y", "yes"})
_SUFFIX = ".in"


@click.command("new-plugin")
@click.argument("name")
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where the folder lmcache-core-NAME is made; here by default.",
)
def command(name: str, parent: Path) -> None:
    """Makes a package for the backend NAME: it works as it is, and says where your store goes.

    NAME is what a config file will write under `backend`.
    """
    check_name(name)
    check_free(name)
    target = parent / f"{_PREFIX}{name}"
    write(render(name), target)
    click.echo(
        f"{target}: a working backend {name!r}, which keeps each value in a file. Next:\n"
        f"  cd {shlex.quote(str(target.absolute() if str(target).startswith('-') else target))}\n"
        "  pip install -e '.[test]'\n"
        "  pytest --conformance-strict\n"
        '  grep -rn "FILL IN" . --exclude-dir="*.egg-info"    # what to replace by your store'
    )


def check_name(name: str) -> None:
    """
    Raises:
        ConfigError: `name` can't be a backend, a distribution and a module; says what would do.
    """
    if name.startswith(_PREFIX.rstrip("-")):
        raise ConfigError(f"{name!r}: give the name without {_PREFIX!r}, which is put before it")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} can't be a name: use a-z, 0-9 and single '-' between, a letter first")
    if len(name) > MAX_NAME_CHARS:
        raise ConfigError(f"the name has {len(name)} characters: use at most {MAX_NAME_CHARS}")
    for clashes, reason in (
        (name in _YAML_WORDS, "means something else in a config file, which is YAML"),
        (
            name.startswith("test"),
            "makes classes that pytest takes for tests, as all that begins with 'test'",
        ),
        (keyword.iskeyword(name) or keyword.issoftkeyword(name), "is a keyword of Python"),
        (name in sys.stdlib_module_names, "is a module of Python itself, for which readers would take it"),
        (name in _RESERVED, "belongs to lmcache-core itself"),
    ):
        if clashes:
            raise ConfigError(f"{name!r} {reason}: choose another name")


def check_free(name: str) -> None:
    """
    Raises:
        ConfigError: something installed has this name already.
    """
    for plugin in discover().plugins:
        if plugin.name == name:
            raise ConfigError(
                f"{plugin.distribution} is installed and has a plugin named {name!r}: choose another name, "
                "or uninstall it"
            )
    distribution = f"{_PREFIX}{name}"
    if any(distributions(name=distribution)):
        raise ConfigError(f"{distribution} is installed already: choose another name, or uninstall it")
    package = _package(name)
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"a module {package} is installed already: choose another name, or uninstall it")


def render(name: str) -> dict[Path, str]:
    """The package's files for a checked name: path inside it, and text."""
    words = {
        "name": name,
        "Name": " ".join(word.capitalize() for word in name.split("-")),
        "Class": "".join(word.capitalize() for word in name.split("-")),
        "distribution": f"{_PREFIX}{name}",
        "package": _package(name),
        "core_version": version("lmcache-core"),
        "api_major": str(API[0]),
        "api_minor": str(API[1]),
    }
    sources = sorted(TEMPLATE.rglob(f"*{_SUFFIX}"))
    return {
        _target(source.relative_to(TEMPLATE), words["package"]): Template(
            source.read_text(encoding="utf-8")
        ).substitute(words)
        for source in sources
    }


def write(files: dict[Path, str], target: Path) -> None:
    """Makes the directory `target` with these files: all of them, or nothing.

    Raises:
        ConfigError: it is there already and not an empty directory, or it can't be made.
    """
    if target.is_symlink() or (target.exists() and not _is_empty_directory(target)):
        raise ConfigError(f"{target} is there already and not an empty directory: remove it, or use --dir")
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        for path, text in files.items():
            file = staging / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        staging.rename(target)  # also onto an empty directory
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise ConfigError(f"{target} can't be made: {error}") from error


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _package(name: str) -> str:
    return f"{_PREFIX}{name}".replace("-", "_")


def _target(source: Path, package: str) -> Path:
    """`dot-x` stands for `.x`, which wouldn't be packaged, and `package` for the module's name."""
    parts = []
    for part in source.parts:
        renamed = package if part == "package" else part.removesuffix(_SUFFIX)
        parts.append(f".{renamed.removeprefix('dot-')}" if renamed.startswith("dot-") else renamed)
    return Path(*parts)
