"""What conftest.py makes of skips, and of how many processes a run takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPS = "import pytest\n@pytest.mark.skip(reason='no time')\ndef test_late(): ...\n"
SKIPS_ON_A_GPU = "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip(reason='no GPU')\ndef test_fast(): ...\n"
SKIPS_AS_A_WHOLE = "import pytest\npytest.importorskip('no_such_module')\n"
PASSES = "def test_fine(): ...\n"


Pytest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Pytest:
    """Runs pytest on two modules, one of them with this source, under the rules of this repository."""

    def run(source: str, *arguments: str, in_ci: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\ntestpaths = .\n")
        (tmp_path / "test_one.py").write_text(source)
        (tmp_path / "test_two.py").write_text(PASSES)
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env={**own, "CI": in_ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the others take a second
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize("workers", ["0", "2"], ids=["one process", "workers"])
@pytest.mark.parametrize(
    ("source", "in_ci", "exit_code"),
    [
        (SKIPS, "true", 1),
        (SKIPS, "", 0),
        (SKIPS_ON_A_GPU, "true", 0),
        (SKIPS_AS_A_WHOLE, "true", 1),
    ],
    ids=["in CI", "elsewhere", "gpu in CI", "module in CI"],
)
def test_a_skip_fails_ci_unless_it_is_for_want_of_a_gpu(
    run: Pytest, source: str, in_ci: str, exit_code: int, workers: str
) -> None:
    done = run(source, "-n", workers, in_ci=in_ci)
    assert done.returncode == exit_code, done.stdout
    assert ("skips that CI does not allow" in done.stdout) == (exit_code == 1)


def test_a_directory_named_like_the_marker_excuses_nothing(run: Pytest, tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_three.py").write_text(SKIPS)
    assert run(PASSES, "-n", "2", in_ci="true").returncode == 1


def test_a_test_that_ends_its_process_fails_the_run_and_is_run_once(run: Pytest, tmp_path: Path) -> None:
    [workers] = re.findall(r"^WORKERS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    ends = "import os\ndef test_end():\n    open('ended', 'a').write('.')\n    os._exit(0)\n"
    assert run(ends, *workers.split()).returncode != 0
    assert (tmp_path / "ended").read_text() == "."


@pytest.mark.parametrize(
    ("arguments", "has_workers"),
    [([], True), (["-x"], True), (["test_two.py"], False), (["-k", "fine"], False), (["--pdb"], False)],
    ids=str,
)
def test_only_a_run_of_the_whole_suite_is_shared_out(
    run: Pytest, arguments: list[str], has_workers: bool
) -> None:
    done = run(PASSES, "-n", "auto", "--dist", "loadfile", *arguments)
    assert done.returncode == 0, done.stdout
    assert ("workers" in done.stdout) == has_workers
