"""A virtual environment of its own, with wheels of this repository and exactly what they say they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


class FreshEnvironment:
    """Wheels are installed by pip; their dependencies are linked from the environment that runs the tests.

    So nothing is downloaded, and what a wheel forgot, a file or a dependency, is missing here too.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wheels = directory / "wheels"
        venv.create(directory / "venv", with_pip=False, symlinks=True)
        self.python = directory / "venv" / "bin" / "python"
        [self._packages] = (directory / "venv" / "lib").glob("python*/site-packages")

    def install(self, *projects: Path, extra: str = "") -> None:
        """Builds a wheel of each project, from a copy of its files, and installs them, with that extra."""
        copies = [self._copy(project) for project in projects]
        before = set(self._wheels.glob("*"))
        self._pip("wheel", "--no-build-isolation", "-w", str(self._wheels), *map(str, copies))
        wheels = sorted(set(self._wheels.glob("*")) - before)
        self._pip("install", *map(str, wheels))
        for wheel in wheels:
            self._link_dependencies(wheel.name.split("-", 1)[0], extra)

    def run(self, *command: str, cwd: Path, timeout_s: float = 300, **env: str) -> str:
        """The output of a command of this environment, such as `python` or `pytest`; it must succeed."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        done = subprocess.run(
            [self.python.with_name(command[0]), *command[1:]],
            cwd=cwd,
            env={**own, "CI": "", **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _copy(self, project: Path) -> Path:
        """Building in the working tree would leave files there, and take up what others left."""
        copy = self._directory / "sources" / (project.name if project != ROOT else "core")
        leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*_cache")
        if project == ROOT:
            copy.mkdir(parents=True)
            for name in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copy(ROOT / name, copy)
            shutil.copytree(ROOT / "lmcache_core", copy / "lmcache_core", ignore=leave)
        else:
            shutil.copytree(project, copy, ignore=leave)
        return copy

    def _pip(self, action: str, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        where = [] if action == "wheel" else ["--python", str(self.python)]
        done = subprocess.run(
            [*pip, *where, action, "--no-deps", "--no-index", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _link_dependencies(self, name: str, extra: str) -> None:
        [installed] = Distribution.discover(name=name, path=[str(self._packages)])
        needed = [(text, {extra}) for text in installed.requires or ()]
        while needed:
            text, wanted = needed.pop()
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": e}) for e in (*wanted, "")):
                continue
            if any(Distribution.discover(name=requirement.name, path=[str(self._packages)])):
                continue
            dependency = distribution(requirement.name)
            self._link(dependency)
            needed += [(more, requirement.extras) for more in dependency.requires or ()]

    def _link(self, dependency: Distribution) -> None:
        own = {Path(file).parts[0] for file in dependency.files or ()}
        for name in own - {"..", "__pycache__"}:
            target = Path(str(dependency.locate_file(name)))
            if not (self._packages / name).exists():
                (self._packages / name).symlink_to(target)
        for script in dependency.entry_points.select(group="console_scripts"):
            path = self.python.with_name(script.name)
            call = f"from {script.module} import {script.attr} as run\nsys.exit(run())\n"
            path.write_text(f"#!{self.python}\nimport sys\n{call}")
            path.chmod(0o755)
