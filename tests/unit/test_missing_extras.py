"""What a user sees who installed the core without the packages of a host engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.connectors import needs_extra
from lmcache_core.errors import ConfigError

REMEDY = "torch is not installed, which this needs: pip install 'lmcache-core[transformers]'"
COMMAND = "from lmcache_core.cli.main import main; main()"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs Python where importing torch fails as if it weren't installed; exit code and what was printed."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    (tmp_path / "cache.yaml").write_text("tiers: [{name: a, backend: cpu, capacity: 1MiB}]\n")
    (tmp_path / "tokens").write_text("1 2 3\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    def run(code: str, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout

    return run


def test_the_generator_names_the_package_and_the_command_that_installs_it(
    run: Callable[..., tuple[int, str]],
) -> None:
    _, output = run("from lmcache_core import CachedGenerator")
    assert output.splitlines()[-1] == f"lmcache_core.errors.ConfigError: {REMEDY}"


def test_the_demo_says_it_in_one_line(run: Callable[..., tuple[int, str]]) -> None:
    code, output = run(COMMAND, "demo", "--config", "cache.yaml")
    assert code == 1
    assert output.splitlines()[-1] == f"Error: {REMEDY}"
    assert "Traceback" not in output


def test_explaining_with_a_model_says_it_in_one_line(run: Callable[..., tuple[int, str]]) -> None:
    code, output = run(COMMAND, "explain", "--config", "cache.yaml", "--tokens", "tokens", "--model", ".")
    assert (code, output) == (1, f"Error: {REMEDY}\n")


def test_a_module_of_our_own_that_is_missing_is_no_question_of_installing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lmcache_core\.absent"), needs_extra("transformers"):
        raise ModuleNotFoundError("No module named 'lmcache_core.absent'", name="lmcache_core.absent")
    with pytest.raises(ConfigError, match=r"pip install 'lmcache-core\[x\]'"), needs_extra("x"):
        raise ModuleNotFoundError("No module named 'a.b'", name="a.b")
