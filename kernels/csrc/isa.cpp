// Copying, narrowing and hashing, compiled once for each instruction set (LMCK_ISA names it, flags select it).
//
// No C++ library header here: its inline functions would be compiled for this instruction set, and the linker
// could then keep that copy for every processor.
#include "isa.h"

#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace lmck {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLane = 64;
inline void stream_lane(char *to, const char *from) {
  _mm512_stream_si512(reinterpret_cast<__m512i *>(to), _mm512_loadu_si512(from));
}
#elif defined(__AVX2__)
constexpr int64_t kLane = 32;
inline void stream_lane(char *to, const char *from) {
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
#elif defined(__SSE2__)
constexpr int64_t kLane = 16;
inline void stream_lane(char *to, const char *from) {
  _mm_stream_si128(reinterpret_cast<__m128i *>(to), _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
#else
constexpr int64_t kLane = 16;
inline void stream_lane(char *to, const char *from) { memcpy(to, from, kLane); }
#endif

void stream_row(char *to, const char *from, int64_t nbytes) {
  const int64_t ahead = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) & (kLane - 1);
  if (ahead) {
    const int64_t head = ahead < nbytes ? ahead : nbytes;
    memcpy(to, from, static_cast<size_t>(head));
    to += head, from += head, nbytes -= head;
  }
  for (; nbytes >= 4 * kLane; nbytes -= 4 * kLane, to += 4 * kLane, from += 4 * kLane) {
    stream_lane(to, from);
    stream_lane(to + kLane, from + kLane);
    stream_lane(to + 2 * kLane, from + 2 * kLane);
    stream_lane(to + 3 * kLane, from + 3 * kLane);
  }
  for (; nbytes >= kLane; nbytes -= kLane, to += kLane, from += kLane) stream_lane(to, from);
  if (nbytes) memcpy(to, from, static_cast<size_t>(nbytes));
}

void copy(const Box &box, bool stream) {
  const Axis &outer = box.axes[0], &middle = box.axes[1], &inner = box.axes[2];
  for (int64_t i = 0; i < outer.count; ++i) {
    for (int64_t j = 0; j < middle.count; ++j) {
      char *to = reinterpret_cast<char *>(box.to) + i * outer.to_stride + j * middle.to_stride;
      const char *from =
          reinterpret_cast<const char *>(box.from) + i * outer.from_stride + j * middle.from_stride;
      for (int64_t k = 0; k < inner.count; ++k, to += inner.to_stride, from += inner.from_stride) {
        if (stream) {
          stream_row(to, from, box.row_nbytes);
        } else {
          memcpy(to, from, static_cast<size_t>(box.row_nbytes));
        }
      }
    }
  }
}

void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr float kLargest = 448.0f;           // of float8_e4m3fn
constexpr float kSmallestScale = 0x1p-126f;  // keeps the division away from zero and subnormals

// Rows are taken to registers and back in pieces of a fixed length, which compilers turn into vectors.
constexpr int64_t kPiece = 32;

inline uint8_t narrowed(uint16_t from, float scale) {
  const float value = float_of(static_cast<uint32_t>(from) << 16) / scale;
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  // To nearest, ties to even: 20 of 23 bits go; below 2^-6 the addition leaves multiples of 2^-9.
  const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t code = magnitude < bits_of(0x1p-6f) ? subnormal : normal;
  return static_cast<uint8_t>((bits >> 24 & 0x80) | (code < 0x7e ? code : 0x7e));
}

inline uint16_t widened(uint8_t from, float scale) {
  const uint32_t magnitude = from & 0x7fu, sign = (from & 0x80u) << 24;
  const float value = float_of(sign | bits_of(float_of(magnitude << 20) * 0x1p120f)) * scale;
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  // A NaN, of the code or of the scale, stays one: rounded, it could become anything.
  const bool is_nan = magnitude == 0x7f || (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

float narrow(uint8_t *to, const uint8_t *from, int64_t dim) {
  uint16_t most = 0;  // magnitudes of bfloat16 are ordered as integers, NaN above infinity above all
  for (int64_t first = 0; first < dim; first += kPiece) {
    uint16_t piece[kPiece] = {};
    memcpy(piece, from + 2 * first, 2 * static_cast<size_t>(dim - first < kPiece ? dim - first : kPiece));
    for (int64_t i = 0; i < kPiece; ++i) {
      const uint16_t magnitude = piece[i] & 0x7fff;
      most = magnitude > most ? magnitude : most;
    }
  }
  if (most >= 0x7f80) {
    memset(to, 0x7f, static_cast<size_t>(dim));
    return 1.0f;
  }
  const float largest = float_of(static_cast<uint32_t>(most) << 16) / kLargest;
  const float scale = largest > kSmallestScale ? largest : kSmallestScale;
  for (int64_t first = 0; first < dim; first += kPiece) {
    const size_t count = static_cast<size_t>(dim - first < kPiece ? dim - first : kPiece);
    uint16_t piece[kPiece] = {};
    uint8_t codes[kPiece];
    memcpy(piece, from + 2 * first, 2 * count);
    for (int64_t i = 0; i < kPiece; ++i) codes[i] = narrowed(piece[i], scale);
    memcpy(to + first, codes, count);
  }
  return scale;
}

void widen(uint8_t *to, const uint8_t *from, int64_t dim, float scale) {
  for (int64_t first = 0; first < dim; first += kPiece) {
    const size_t count = static_cast<size_t>(dim - first < kPiece ? dim - first : kPiece);
    uint8_t codes[kPiece] = {};
    uint16_t piece[kPiece];
    memcpy(codes, from + first, count);
    for (int64_t i = 0; i < kPiece; ++i) piece[i] = widened(codes[i], scale);
    memcpy(to + 2 * first, piece, 2 * count);
  }
}

constexpr int64_t kPage = 4096;
constexpr int64_t kBatch = 64;

uint64_t checksum(const void *memory, int64_t nbytes) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "page digests are hashed as little-endian words");
  const char *page = static_cast<const char *>(memory);
  uint64_t digests[kBatch];
  if (nbytes <= kBatch * kPage) {
    const int64_t num_pages = nbytes / kPage;
    for (int64_t i = 0; i < num_pages; ++i) digests[i] = XXH3_64bits(page + i * kPage, kPage);
    return XXH3_64bits(digests, static_cast<size_t>(num_pages) * sizeof digests[0]);
  }
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (int64_t left = nbytes / kPage; left > 0;) {
    const int64_t num_pages = left < kBatch ? left : kBatch;
    for (int64_t i = 0; i < num_pages; ++i, page += kPage) digests[i] = XXH3_64bits(page, kPage);
    XXH3_64bits_update(&state, digests, static_cast<size_t>(num_pages) * sizeof digests[0]);
    left -= num_pages;
  }
  return XXH3_64bits_digest(&state);
}

}  // namespace

#define LMCK_TEXT(name) #name
#define LMCK_STRING(name) LMCK_TEXT(name)
extern const Instructions LMCK_TABLE;
const Instructions LMCK_TABLE = {LMCK_STRING(LMCK_ISA), copy, fence, narrow, widen, checksum};

}  // namespace lmck
