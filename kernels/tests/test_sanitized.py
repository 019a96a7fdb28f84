"""The host library under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1]
FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
OBJECTS = {
    "host": ["csrc/host.cpp"],
    "payloads": ["csrc/payloads.cpp"],
    "baseline": ["csrc/isa.cpp", "-DLMCK_ISA=baseline", "-DLMCK_TABLE=kBaseline"],
    "avx2": ["csrc/isa.cpp", "-DLMCK_ISA=avx2", "-DLMCK_TABLE=kAvx2", "-mavx2"],
    "avx512": ["csrc/isa.cpp", "-DLMCK_ISA=avx512", "-DLMCK_TABLE=kAvx512", "-mavx512f"],
}

# A segment that ends early (a bytearray has a spare byte), and a slot array that does.
TOO_FAR = """
import ctypes, sys
sys.path.insert(0, sys.argv[2])
import matrix
from lmcache_core_kernels import abi
library = ctypes.CDLL(sys.argv[1])
abi.declare_host(library)
case = matrix.Case("nshe", 1, 2, 3, 4, 64, slots=[1, 7, 4])
segments = [bytearray(2 * 3 * 128)]
call = matrix.Call(case, matrix.new_tensors(case), segments)
assert call.run(library, "lmck_gather") == 0
if sys.argv[3] == "segment":
    segments[0] = bytearray(2 * 3 * 128 - 2)
    call = matrix.Call(case, matrix.new_tensors(case), segments)
else:
    call.frame.num_tokens += 1000
print("before", flush=True)
call.run(library, "lmck_gather")
print("after", flush=True)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as built, but with sanitizers."""
    build = tmp_path_factory.mktemp("sanitized")
    include = ["-I", "include", "-I", "csrc", "-isystem", "third_party/xxhash", "-DLMCK_X86"]
    for name, arguments in OBJECTS.items():
        output = ["-c", "-w", "-o", str(build / f"{name}.o")]
        subprocess.run(["g++", *FLAGS, *include, *arguments, *output], cwd=KERNELS, check=True)
    library = build / "libsanitized.so"
    objects = [str(build / f"{name}.o") for name in OBJECTS]
    subprocess.run(["g++", *FLAGS, "-shared", *objects, "-o", str(library), "-lpthread"], check=True)
    return library


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = dict(os.environ) | {
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each buffer an allocation that the sanitizer knows
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_matrix_reads_and_writes_no_byte_too_far(sanitized: Path) -> None:
    done = run(str(KERNELS / "tests" / "matrix.py"), str(sanitized), "5", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "baseline"


@pytest.mark.parametrize("what", ["segment", "slots"])
def test_the_sanitizers_would_see_a_byte_too_far(sanitized: Path, what: str) -> None:
    done = run("-c", TOO_FAR, str(sanitized), str(KERNELS / "tests"), what)
    assert done.returncode != 0
    assert done.stdout == "before\n"
    assert "heap-buffer-overflow" in done.stderr
