from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPS = "import pytest\n@pytest.mark.skip(reason='no time')\ndef test_late(): ...\n"
SKIPS_ON_A_GPU = "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip(reason='no GPU')\ndef test_fast(): ...\n"
SKIPS_AS_A_WHOLE = "import pytest\npytest.importorskip('no_such_module')\n"
PASSES = "def test_fine(): ...\n"


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
    tmp_path: Path, source: str, in_ci: str, exit_code: int
) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_one.py").write_text(source)
    (tmp_path / "test_two.py").write_text(PASSES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "CI": in_ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout
    assert ("skips that CI does not allow" in done.stdout) == (exit_code == 1)
