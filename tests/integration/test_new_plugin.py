"""What `lmcache-core new-plugin` makes, used as by its author: installed from wheels, far from this tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fresh_environment import ROOT, FreshEnvironment
from store_and_load import PROGRAM

CONFIG = """
tiers:
  - name: memory
    backend: cpu
    capacity: 32MiB
  - name: boxes
    backend: card-box
    capacity: 64MiB
    options:
      path: ./boxes
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """Core, suite and the cpu plugin, from their wheels."""
    environment = FreshEnvironment(tmp_path_factory.mktemp("fresh"))
    environment.install([ROOT, ROOT / "conformance", ROOT / "plugins" / "cpu"])
    return environment


@pytest.fixture(scope="module")
def project(environment: FreshEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("author")
    environment.run("lmcache-core", "new-plugin", "card-box", cwd=place)  # the wheel has the template
    project = place / "lmcache-core-card-box"
    environment.install([project], extras=["test"])
    return project


def test_a_new_plugin_is_listed_as_usable(environment: FreshEnvironment, project: Path) -> None:
    output = environment.run("lmcache-core", "plugins", cwd=project)
    assert [line.split() for line in output.splitlines()[1:]] == [
        ["card-box", "0.1.0", "1.0", "ok"],
        ["conformance", "0.1.0", "-", "ok"],
        ["cpu", "0.1.0", "1.0", "ok"],
    ]


def test_a_new_plugin_passes_its_own_tests_with_nothing_unproven(
    environment: FreshEnvironment, project: Path
) -> None:
    output = environment.run("pytest", "--conformance-strict", "-q", "-p", "no:cacheprovider", cwd=project)
    assert re.fullmatch(r"\d+ passed, \d+ not applicable in .*", output.splitlines()[-1])


def test_what_one_process_stores_in_a_new_plugin_another_loads(
    environment: FreshEnvironment, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache.yaml").write_text(CONFIG)
    checked = environment.run("lmcache-core", "config", "check", "--open", "cache.yaml", cwd=tmp_path)
    assert checked == "cache.yaml: ok: memory (cpu) -> boxes (card-box), all opened\n"
    assert environment.run("python", "-c", PROGRAM, "store", cwd=tmp_path) == "992 True\n"
    assert environment.run("python", "-c", PROGRAM, "load", cwd=tmp_path) == "{'boxes': 992}\n"


def test_the_name_of_an_installed_backend_is_refused(environment: FreshEnvironment, project: Path) -> None:
    with pytest.raises(AssertionError, match="lmcache-core-card-box is installed and has a plugin named"):
        environment.run("lmcache-core", "new-plugin", "card-box", cwd=project)
    assert not (project / "lmcache-core-card-box").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "lmcache_core_card_box"],
    ],
    ids=["ruff", "format", "mypy"],
)
def test_a_new_plugins_code_is_clean(project: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT if command[0] == "mypy" else project,  # the repository's settings, and what mypy knows of it
        env={"MYPYPATH": str(project / "src"), "PATH": "", "RUFF_NO_CACHE": "true"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_plugins_ci_runs_the_suite_without_anything_unproven(project: Path) -> None:
    workflow = yaml.safe_load((project / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["conformance"]["steps"]]
    assert "pytest --conformance-strict" in steps
