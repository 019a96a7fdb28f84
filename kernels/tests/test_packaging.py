"""What an install makes of machines without nvcc, and what make makes of those without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lmcache_core_kernels

ROOT = Path(__file__).parents[2]
TOOLS = ("cc", "c++", "gcc", "g++", "as", "ld", "ar", "ranlib", "nm", "cmake", "ninja", "make", "sh", "uname")


def tools_without_nvcc(directory: Path) -> str:
    """A PATH of a compiler and what builds with it, and nothing else."""
    directory.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (directory / tool).symlink_to(found)
    return str(directory)


def test_a_wheel_without_nvcc_has_the_host_library_and_says_so(tmp_path: Path) -> None:
    source = tmp_path / "kernels"  # building in the working tree could leave files there
    shutil.copytree(ROOT / "kernels", source, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_PATH")}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source]
    path = tools_without_nvcc(tmp_path / "bin")
    built = subprocess.run(wheel, env=environment | {"PATH": path}, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [file] = tmp_path.glob("*.whl")
    assert file.name.startswith("lmcache_core_kernels-0.1.0-py3-none-linux")
    archive = zipfile.ZipFile(file)
    names = archive.namelist()
    assert "lmcache_core_kernels/liblmcache_core_kernels.so" in names
    assert not [name for name in names if "cuda" in name]
    assert any(name.endswith("licenses/third_party/xxhash/LICENSE") for name in names)
    [licence] = [name for name in names if name.endswith("dist-info/licenses/LICENSE")]
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, file], check=True)
    said = subprocess.run(
        [sys.executable, "-S", "-m", "lmcache_core_kernels"],  # -S: not the one installed here
        env=environment | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.startswith("lmcache-core-kernels 0.1.0: host (")
    assert said.stdout.endswith("no CUDA (nvcc was not there at build time)\n")


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("fits", [True, False])
def test_an_nvcc_that_cant_compile_the_launchers_leaves_the_host_library_alone(
    tmp_path: Path, fits: bool
) -> None:
    nvcc = shutil.which("nvcc")
    stand_in = tmp_path / "bin" / "nvcc"  # unless it fits, it compiles all but device.cu, as before 12.1
    stand_in.parent.mkdir()
    refuse = 'case "$*" in *device.cu*) echo "formal parameter space overflowed" >&2; exit 1;; esac'
    stand_in.write_text(f'#!/bin/sh\n{"" if fits else refuse}\nexec {nvcc} "$@"\n')
    stand_in.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_PATH")}
    done = subprocess.run(
        ["cmake", "-S", ROOT / "kernels", "-B", tmp_path / "build"],
        env=environment | {"PATH": f"{stand_in.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("formal parameter space overflowed" in done.stdout) is not fits
    assert f"lmcache-core-kernels is built for: host{' and CUDA ' if fits else chr(10)}" in done.stdout


def test_make_goes_on_without_a_compiler_and_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".packages").touch()
    mark = f"{tmp_path}/.kernels"
    assumed = ["-o", f"{tmp_path}/.packages", f"VENV={tmp_path}"]
    done = subprocess.run(
        ["make", "-C", ROOT, *assumed, "PIP=false", mark], capture_output=True, text=True, check=True
    )
    told = [line for line in done.stdout.splitlines() if "lmcache-core-kernels" in line]
    why = f"({tmp_path}/kernels.log says why)"
    assert told == [f"lmcache-core-kernels could not be built {why}: KV is moved by torch instead"]


def test_importing_the_package_and_its_description_loads_no_torch() -> None:
    code = (
        "import sys, lmcache_core_kernels as k; assert 'ctypes' not in sys.modules; k.build_info();"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_gpu_check_builds_and_its_host_twin_passes(tmp_path: Path) -> None:
    environment = dict(os.environ) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / "kernels" / "gpu_check.sh", "kept.md"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built for sm_90" in done.stdout
    assert "host and twin: baseline" in done.stdout
    assert "host and twin: baseline" in (tmp_path / "kept.md").read_text(), "OUTPUT is relative to the caller"


def test_a_cuda_library_that_does_not_load_costs_the_gpu_alone_and_is_told(tmp_path: Path) -> None:
    package = tmp_path / "lmcache_core_kernels"
    for source in map(Path, lmcache_core_kernels.__path__):
        shutil.copytree(source, package, dirs_exist_ok=True)
    for bad in (b"garbage", (package / "liblmcache_core_kernels.so").read_bytes()):
        (package / "liblmcache_core_kernels_cuda.so").write_bytes(bad)
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_core_kernels"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "no CUDA (" in done.stdout
        assert "liblmcache_core_kernels_cuda.so" in done.stdout
