"""Every figure the core is held to, one script after the other: `python benchmarks`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("disk.py", "engine_paths.py", "executor_overhead.py", "kernels.py")


def main() -> int:
    failed = []
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        if subprocess.run([sys.executable, Path(__file__).parent / script]).returncode:
            failed.append(script)
    print("missed: " + ", ".join(failed) if failed else "all bounds met")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
