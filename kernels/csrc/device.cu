// Gather and scatter on a CUDA device: one launch a frame for all layers of a group.
//
// Everything the kernel needs but the slots travels in its arguments, so a launch allocates nothing, waits for
// nothing and leaves nothing that must outlive it.
#include <cuda_runtime.h>

#include "paged.cuh"

namespace lmck {
namespace {

constexpr int kLayers = 128;  // of one launch; its arguments have 13 KiB of 32
constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 65535;

struct Group {
  Shape shape;
  lmck_plane planes[2 * kLayers];
  uint64_t segments[kLayers];
  unsigned long long *num_bad_slots;
};

// Grid: tokens, heads, layers. Threads: words of a token's content, tokens.
template <typename Word, bool kGather>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ Group group) {
  const Shape &shape = group.shape;
  const int64_t words = shape.num_planes * shape.row_nbytes / static_cast<int64_t>(sizeof(Word));
  const lmck_plane *planes = group.planes + static_cast<int64_t>(blockIdx.z) * shape.num_planes;
  const uint64_t segment = group.segments[blockIdx.z];
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; token < shape.num_tokens;
       token += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t slot = slot_of(shape, token);
    if (!is_slot(shape, slot)) {  // never followed, whatever it is
      if (slot != kHole && group.num_bad_slots != nullptr && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
        atomicAdd(group.num_bad_slots, 1ull);
      }
      continue;
    }
    for (int64_t head = blockIdx.y; head < shape.num_heads; head += gridDim.y) {
      for (int64_t word = threadIdx.x; word < words; word += blockDim.x) {
        move_word<Word, kGather>(shape, planes, segment, head, token, slot, word);
      }
    }
  }
}

template <typename Word, bool kGather>
cudaError_t launch(const Group &group, int64_t num_layers, cudaStream_t stream) {
  const int64_t words = group.shape.num_planes * group.shape.row_nbytes / static_cast<int64_t>(sizeof(Word));
  unsigned x = 1;
  while (x < words && x < kThreads) x *= 2;
  const unsigned y = kThreads / x;
  const int64_t tokens = (group.shape.num_tokens + y - 1) / y;
  const dim3 grid(static_cast<unsigned>(tokens < kMostBlocks ? tokens : kMostBlocks),
                  static_cast<unsigned>(group.shape.num_heads < kMostBlocks ? group.shape.num_heads : kMostBlocks),
                  static_cast<unsigned>(num_layers));
  move_kernel<Word, kGather><<<grid, dim3(x, y), 0, stream>>>(group);
  return cudaGetLastError();
}

template <bool kGather>
cudaError_t launch_widest(const Group &group, int64_t num_layers, int64_t word, cudaStream_t stream) {
  switch (word) {
    case 16: return launch<Word16, kGather>(group, num_layers, stream);
    case 8: return launch<uint64_t, kGather>(group, num_layers, stream);
    case 4: return launch<uint32_t, kGather>(group, num_layers, stream);
    case 2: return launch<uint16_t, kGather>(group, num_layers, stream);
    default: return launch<uint8_t, kGather>(group, num_layers, stream);
  }
}

template <bool kGather>
int32_t move(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames, void *stream,
             uint64_t num_bad_slots, lmck_fault *fault) {
  if (!is_sound(*layout) || layout->narrow || num_frames < 0) return LMCK_BAD_SHAPE;
  for (int64_t f = 0; f < num_frames; ++f) {
    if (!is_sound(frames[f])) return LMCK_BAD_SHAPE;
  }
  for (int64_t f = 0; f < num_frames; ++f) {
    const int64_t word = word_nbytes(*layout, frames[f]);
    for (int64_t first = 0; first < layout->num_layers; first += kLayers) {
      Group group{};
      group.shape = shape_of(*layout, frames[f]);
      group.num_bad_slots = reinterpret_cast<unsigned long long *>(num_bad_slots);
      const int64_t left = layout->num_layers - first;
      const int64_t num_layers = left < kLayers ? left : kLayers;
      for (int64_t i = 0; i < num_layers; ++i) {
        for (int64_t p = 0; p < layout->num_planes; ++p) {
          group.planes[i * layout->num_planes + p] = layout->planes[(first + i) * layout->num_planes + p];
        }
        group.segments[i] = frames[f].segments[first + i];
      }
      const cudaError_t error = launch_widest<kGather>(group, num_layers, word, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) {
        if (fault != nullptr) *fault = lmck_fault{f, first, error};
        return LMCK_CUDA;
      }
    }
  }
  return LMCK_OK;
}

}  // namespace
}  // namespace lmck

extern "C" {

int32_t lmck_abi(void) { return LMCK_ABI; }

const char *lmck_device_built_for(void) { return LMCK_BUILT_FOR; }

const char *lmck_device_error(int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int32_t lmck_device_count(void) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int32_t lmck_device_gather(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames, void *stream,
                           uint64_t num_bad_slots, lmck_fault *fault) {
  return lmck::move<true>(layout, frames, num_frames, stream, num_bad_slots, fault);
}

int32_t lmck_device_scatter(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames, void *stream,
                            uint64_t num_bad_slots, lmck_fault *fault) {
  return lmck::move<false>(layout, frames, num_frames, stream, num_bad_slots, fault);
}
}
