// What is compiled once for each instruction set, and chosen when the library first runs.
#pragma once

#include <stdint.h>

namespace lmck {

struct Axis {
  int64_t count, to_stride, from_stride;  // strides in bytes
};

// Rows of `row_nbytes` bytes at `to` + strides, from `from` + strides. The last axis is the innermost.
struct Box {
  uint64_t to, from;
  int64_t row_nbytes;
  Axis axes[3];
};

struct Instructions {
  const char *name;
  // Copies a box. `stream` writes past the caches; the caller ends with `fence`.
  void (*copy)(const Box &box, bool stream);
  void (*fence)();
  // `dim` bfloat16 at any address to float8_e4m3fn, returning their scale, and back.
  float (*narrow)(uint8_t *to, const uint8_t *from, int64_t dim);
  void (*widen)(uint8_t *to, const uint8_t *from, int64_t dim, float scale);
  uint64_t (*checksum)(const void *memory, int64_t nbytes);
};

extern const Instructions kBaseline;
#ifdef LMCK_X86
extern const Instructions kAvx2;
extern const Instructions kAvx512;
#endif

}  // namespace lmck
