// The index arithmetic of paged KV, and the kernel body that moves one word. For host and device alike.
#pragma once

#include "lmcache_core_kernels.h"

#ifdef __CUDACC__
#define LMCK_BOTH __host__ __device__ __forceinline__
#else
#define LMCK_BOTH inline
#endif

namespace lmck {

struct alignas(16) Word16 {
  uint64_t low, high;
};

constexpr int64_t kHole = -1;

// Everything about a call that is the same for all layers. Passed to the device by value.
struct Shape {
  int64_t num_tokens, num_planes, num_heads, num_slots, block_slots, row_nbytes;
  const void *slots;
  int64_t slot_nbytes, first_slot;
};

LMCK_BOTH Shape shape_of(const lmck_layout &layout, const lmck_frame &frame) {
  return Shape{frame.num_tokens, layout.num_planes,  layout.num_heads, layout.num_slots, layout.block_slots,
               layout.row_nbytes, frame.slots,       frame.slot_nbytes, frame.first_slot};
}

// The slot of one token, or kHole.
LMCK_BOTH int64_t slot_of(const Shape &shape, int64_t token) {
  if (shape.slots == nullptr) return shape.first_slot + token;
  if (shape.slot_nbytes == 4) return static_cast<const int32_t *>(shape.slots)[token];
  return static_cast<const int64_t *>(shape.slots)[token];
}

LMCK_BOTH bool is_slot(const Shape &shape, int64_t slot) { return slot >= 0 && slot < shape.num_slots; }

// Address of the row [head][block][place in the block] in the engine's memory.
LMCK_BOTH uint64_t paged_row(const lmck_plane &plane, int64_t head, int64_t block, int64_t place) {
  return plane.base +
         static_cast<uint64_t>(head * plane.head_stride + block * plane.block_stride + place * plane.slot_stride);
}

// Address of the row [head][token][plane] in a segment.
LMCK_BOTH uint64_t packed_row(const Shape &shape, uint64_t segment, int64_t head, int64_t token, int64_t plane) {
  return segment +
         static_cast<uint64_t>(((head * shape.num_tokens + token) * shape.num_planes + plane) * shape.row_nbytes);
}

// Moves word `word` of the content of one token and head (K's words, then V's) in one layer.
template <typename Word, bool kGather>
LMCK_BOTH void move_word(const Shape &shape, const lmck_plane *planes, uint64_t segment, int64_t head,
                         int64_t token, int64_t slot, int64_t word) {
  const int64_t row_words = shape.row_nbytes / static_cast<int64_t>(sizeof(Word));
  const int64_t plane = word >= row_words ? 1 : 0;
  const int64_t column = word - plane * row_words, block = slot / shape.block_slots;
  const uint64_t row = paged_row(planes[plane], head, block, slot - block * shape.block_slots);
  Word *paged = reinterpret_cast<Word *>(row) + column;
  Word *packed = reinterpret_cast<Word *>(packed_row(shape, segment, head, token, plane)) + column;
  if (kGather) {
    *packed = *paged;
  } else {
    *paged = *packed;
  }
}

// The widest word, at most 16 bytes, that every row of the call is aligned to and made of.
inline int64_t word_nbytes(const lmck_layout &layout, const lmck_frame &frame) {
  uint64_t all = 16 | static_cast<uint64_t>(layout.row_nbytes);
  for (int64_t i = 0; i < layout.num_layers * layout.num_planes; ++i) {
    const lmck_plane &plane = layout.planes[i];
    all |= plane.base | static_cast<uint64_t>(plane.head_stride) | static_cast<uint64_t>(plane.block_stride) |
           static_cast<uint64_t>(plane.slot_stride);
  }
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) all |= frame.segments[layer];
  return static_cast<int64_t>(all & (~all + 1));
}

// Bytes of one token and head in a segment.
inline int64_t content_nbytes(const lmck_layout &layout) {
  return layout.narrow ? 2 * layout.narrow + 8 : layout.num_planes * layout.row_nbytes;
}

inline bool is_sound(const lmck_layout &layout) {
  return layout.num_layers > 0 && (layout.num_planes == 1 || layout.num_planes == 2) && layout.num_heads > 0 &&
         layout.num_slots > 0 && layout.block_slots > 0 && layout.row_nbytes > 0 &&
         (layout.narrow == 0 || layout.row_nbytes * layout.num_planes == 2 * 2 * layout.narrow);
}

inline bool is_sound(const lmck_frame &frame) {
  return frame.num_tokens > 0 && (frame.slots == nullptr || frame.slot_nbytes == 4 || frame.slot_nbytes == 8);
}

}  // namespace lmck
