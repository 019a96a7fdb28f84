/* The best plain copies of the same bytes: what the kernels are measured against. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static void stream(char *to, const char *from, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += 256) {
#if defined(__AVX512F__)
    for (int j = 0; j < 256; j += 64) _mm512_stream_si512((__m512i *)(to + i + j), _mm512_loadu_si512(from + i + j));
#elif defined(__AVX2__)
    for (int j = 0; j < 256; j += 32)
      _mm256_stream_si256((__m256i *)(to + i + j), _mm256_loadu_si256((const __m256i *)(from + i + j)));
#else
    for (int j = 0; j < 256; j += 16)
      _mm_stream_si128((__m128i *)(to + i + j), _mm_loadu_si128((const __m128i *)(from + i + j)));
#endif
  }
}

/* The same pages of each layer, from or to one run of `packed`. Non-temporal where `nt` is set. */
void pages(char *packed, char *paged, const int64_t *page, int64_t count, int64_t nbytes, int64_t layers,
           int64_t packed_stride, int64_t paged_stride, int gather, int nt) {
  for (int64_t layer = 0; layer < layers; layer++, packed += packed_stride, paged += paged_stride) {
    for (int64_t i = 0; i < count; i++) {
      char *a = packed + i * nbytes, *b = paged + page[i] * nbytes;
      char *to = gather ? a : b, *from = gather ? b : a;
      if (nt) stream(to, from, nbytes);
      else memcpy(to, from, (size_t)nbytes);
    }
  }
  if (nt) _mm_sfence();
}
