#!/usr/bin/env bash
# The kernels on a GPU, in one command and under 4 minutes. Needs nvcc, g++ and python3 (its standard library).
#
#   kernels/gpu_check.sh [OUTPUT]     OUTPUT: also keep what it prints, such as benchmarks/results/kernels_gpu.md
#
# Builds for sm_90, runs the host twin of the device's body, then the matrix of layouts against the reference with
# fresh data and poisoned outputs, a small one under compute-sanitizer, then layers through the staged copies and
# registered memory, and prints rates beside plain copies. Where torch finds the GPU, it also runs gpu/staged.py.
# Without a GPU it stops after the twin, says so, and succeeds: it builds, and its index arithmetic is right.
set -euo pipefail
[ $# -eq 0 ] || exec > >(tee "$1") 2>&1
cd "$(dirname "$0")"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

nvcc -arch=sm_90 -std=c++17 -O3 -Iinclude -DLMCK_BUILT_FOR='"sm_90"' csrc/device.cu csrc/runtime.cu gpu/*.cu -o "$build/check"
echo "built for sm_90 by $(nvcc --version | grep -o 'release [0-9.]*')"

compile() { g++ -std=c++17 -O2 -fPIC -Iinclude -Icsrc -isystem third_party/xxhash -w "$@"; }
x86=; isa="baseline:kBaseline"
if [ "$(uname -m)" = x86_64 ]; then x86=-DLMCK_X86; isa="$isa avx2:kAvx2:-mavx2 avx512:kAvx512:-mavx512f"; fi
for set in $isa; do
  IFS=: read -r name table flag <<< "$set"
  compile $flag -DLMCK_ISA="$name" -DLMCK_TABLE="$table" -c csrc/isa.cpp -o "$build/$name.o"
done
compile $x86 -shared csrc/host.cpp csrc/payloads.cpp "$build"/*.o -o "$build/libhost.so" -lpthread
echo "host and twin: $(PYTHONPATH=src python3 tests/matrix.py "$build/libhost.so" "$RANDOM" 20)"

if ! nvidia-smi > /dev/null 2>&1; then
  echo "no GPU here: nothing was run on one"
  exit 0
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$build/check" matrix "$RANDOM" 100
if command -v compute-sanitizer > /dev/null; then
  compute-sanitizer --error-exitcode 1 "$build/check" matrix 1 2
else
  echo "compute-sanitizer is not there: left out"
fi
"$build/check" staged "$RANDOM"
"$build/check" rates
path="..:${PYTHONPATH:-}"
if PYTHONPATH="$path" python3 -c 'import sys, torch, lmcache_core; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
  mkdir "$build/lmcache_core_kernels"
  cp src/lmcache_core_kernels/*.py "$build/lmcache_core_kernels/"
  cp "$build/libhost.so" "$build/lmcache_core_kernels/liblmcache_core_kernels.so"
  nvcc -arch=sm_90 -std=c++17 -O3 -Iinclude -DLMCK_BUILT_FOR='"sm_90"' -Xcompiler -fPIC -shared \
    csrc/device.cu csrc/runtime.cu -o "$build/lmcache_core_kernels/liblmcache_core_kernels_cuda.so"
  PYTHONPATH="$build:$path" python3 gpu/staged.py "$RANDOM"
else
  echo "no torch with CUDA, or no lmcache_core, in this python3: gpu/staged.py is left out"
fi
