from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_core

ROOT = Path(__file__).parents[2]


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `statement`."""
    script = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_neither_torch_nor_numpy_nor_any_submodule() -> None:
    loaded = modules_after("import lmcache_core")
    assert not loaded & {"torch", "numpy", "transformers", "click", "rich", "yaml", "msgspec"}
    assert [name for name in loaded if name.startswith("lmcache_core.")] == []


def test_the_sdk_and_the_engine_load_neither_torch_nor_numpy() -> None:
    loaded = modules_after("import lmcache_core.sdk, lmcache_core.engine, lmcache_core.registry")
    assert not loaded & {"torch", "numpy", "transformers"}


def test_the_help_of_the_command_imports_no_command() -> None:
    loaded = modules_after(
        "from click.testing import CliRunner\n"
        "from lmcache_core.cli.main import main\n"
        "assert 'config' in CliRunner().invoke(main, ['--help']).output"
    )
    assert not loaded & {"torch", "numpy", "transformers", "lmcache_core.engine", "lmcache_core.cli.config"}


@pytest.mark.parametrize("module", ["lmcache_core", "lmcache_core.cli.main"])
def test_the_module_runs_the_command_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("lmcache-core, version ")


@pytest.mark.parametrize("name", sorted(set(lmcache_core.__all__) - {"CachedGenerator"}))
def test_every_public_name_can_be_used(name: str) -> None:
    assert getattr(lmcache_core, name) is not None
    assert name in dir(lmcache_core)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CasheEngine'"):
        lmcache_core.CasheEngine  # noqa: B018 (the access is the test)


@pytest.mark.parametrize("folder", ["kernels", "conformance", "plugins/cpu", "plugins/disk", "plugins/redis"])
def test_every_distribution_brings_its_licence(folder: str) -> None:
    assert (ROOT / folder / "pyproject.toml").is_file()
    assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
