"""Runs the code of docs/how-to/write-a-backend.md exactly as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from less_effort import try_less_hard
from store_and_load import PROGRAM

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-backend.md"


def blocks() -> dict[str, str]:
    """The page's code blocks whose first line is a comment with a path, by that path."""
    found = re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs Python with the page's distribution installed and its config file in the working directory.

    The page's harness tries less hard.
    """
    for path, text in blocks().items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    try_less_hard(tmp_path / "tests" / "test_conformance.py", "SqliteHarness")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    [(group, points)] = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")

    def run(code: str, *arguments: str) -> str:
        path = os.pathsep.join(filter(None, [str(tmp_path / "src"), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


COMMAND = "from lmcache_core.cli.main import main; main()"


def test_the_pages_backend_is_listed_as_usable(run: Callable[..., str]) -> None:
    [row] = [line.split() for line in run(COMMAND, "plugins").splitlines() if line.startswith("sqlite ")]
    assert row == ["sqlite", "0.1.0", "1.0", "ok"]


def test_the_pages_config_checks_and_opens(run: Callable[..., str]) -> None:
    output = run(COMMAND, "config", "check", "--open", "cache.yaml")
    assert output == "cache.yaml: ok: memory (cpu) -> table (sqlite), all opened\n"


def test_what_one_process_stores_in_the_pages_backend_another_loads(run: Callable[..., str]) -> None:
    assert run(PROGRAM, "store") == "992 True\n"
    assert run(PROGRAM, "load") == "{'table': 992}\n"


def test_the_pages_backend_passes_the_suite_with_a_file_of_options(run: Callable[..., str]) -> None:
    groups = [argument for group in ("declaration", "lifecycle") for argument in ("--group", group)]
    arguments = ["conformance", "run", "--backend", "sqlite", "--config", "conformance.yaml"]
    lines = run(COMMAND, *arguments, *groups).splitlines()
    (verdicts,) = [line for line in lines if line.startswith("sqlite: ")]
    assert " passed, " in verdicts
    assert " failed" not in verdicts


GROUPS = ["round-trip", "destination", "ownership", "lifecycle", "honesty", "capacity"]
BEHIND = ["deadline", "faults", "corruption", "retention"]


def test_the_pages_harness_leaves_nothing_unproven_of_the_backend(run: Callable[..., str]) -> None:
    groups = [argument for group in GROUPS + BEHIND for argument in ("--group", group)]
    harness = "tests/test_conformance.py:SqliteHarness"
    arguments = ["conformance", "run", "--backend", "sqlite", "--harness", harness, "--strict"]
    lines = run(COMMAND, *arguments, *groups).splitlines()
    (verdicts,) = [line for line in lines if line.startswith("sqlite: ")]
    assert " unproven" not in verdicts
    assert " failed" not in verdicts


def test_the_pages_own_test_module_passes(run: Callable[..., str]) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "-k", "absent", "tests/test_conformance.py"]
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    assert " passed" in run(code, *arguments).splitlines()[-1]
