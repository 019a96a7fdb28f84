// What the commands of the GPU check share.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "lmcache_core_kernels.h"

constexpr unsigned char kPoison = 0xA5;

inline void must(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

template <typename T>
struct Device {
  T *at = nullptr;
  explicit Device(size_t count) { must(cudaMalloc(&at, count * sizeof(T)), "cudaMalloc"); }
  ~Device() { cudaFree(at); }
  Device(const Device &) = delete;
};

int staged(uint64_t seed);
