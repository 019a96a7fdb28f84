// A batch of payloads by one call from Python: their memory is taken, moved without the GIL, and given back.
#include <memory>
#include <new>
#include <vector>

#include "paged.cuh"

namespace lmck {
namespace {

constexpr int kWritable = 1;  // PyBUF_SIMPLE is 0: contiguous bytes

// Py_buffer of the stable ABI.
struct Buffer {
  void *address, *object;
  intptr_t nbytes, item_nbytes;
  int read_only, num_dimensions;
  void *format, *shape, *strides, *suboffsets, *internal;
};
static_assert(sizeof(Buffer) == 80, "as Python lays it out where pointers have 8 bytes");

// Buffers taken. Given back by hand: Python ends daemon threads inside restore_thread when it exits, and a destructor
// would run then, without the GIL.
class Held {
 public:
  Held(const lmck_python &python, int64_t most) : python_(python), buffers_(new Buffer[static_cast<size_t>(most)]) {}

  // Null where Python raised.
  const Buffer *take(void *object, int flags) {
    Buffer *buffer = &buffers_[num_taken_];
    if (python_.get_buffer(object, buffer, flags) != 0) return nullptr;
    ++num_taken_;
    return buffer;
  }

  void release() {
    while (num_taken_ > 0) python_.release_buffer(&buffers_[--num_taken_]);
  }

 private:
  const lmck_python &python_;
  std::unique_ptr<Buffer[]> buffers_;
  size_t num_taken_ = 0;
};

// Takes every segment's memory and writes its address to `addresses`, frame by frame.
int32_t take_payloads(const lmck_python &python, void *payloads, const lmck_layout &layout, lmck_frame *frames,
                      int64_t num_frames, int flags, Held &held, uint64_t *addresses, lmck_fault *fault) {
  for (int64_t f = 0; f < num_frames; ++f) {
    void *payload = python.tuple_item(payloads, f);
    const int64_t num_layers = python.tuple_size(payload);
    if (num_layers != layout.num_layers) {
      *fault = lmck_fault{f, 0, num_layers};
      return LMCK_NUM_LAYERS;
    }
    frames[f].segments = addresses;
    const int64_t nbytes = layout.num_heads * frames[f].num_tokens * content_nbytes(layout);
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      const Buffer *buffer = held.take(python.tuple_item(payload, layer), flags);
      if (buffer == nullptr) return LMCK_RAISED;
      if (buffer->nbytes != nbytes) {
        *fault = lmck_fault{f, layer, buffer->nbytes};
        return LMCK_BAD_SEGMENT;
      }
      *addresses++ = reinterpret_cast<uint64_t>(buffer->address);
    }
  }
  return LMCK_OK;
}

}  // namespace
}  // namespace lmck

extern "C" int32_t lmck_move_payloads(const lmck_python *python, void *payloads, const lmck_layout *layout,
                                      lmck_frame *frames, int64_t num_frames, int32_t num_threads, int32_t gather,
                                      lmck_fault *fault) try {
  using namespace lmck;
  if (!is_sound(*layout) || num_frames < 0) return LMCK_BAD_SHAPE;
  Held held(*python, num_frames * layout->num_layers);
  std::vector<uint64_t> addresses(static_cast<size_t>(num_frames * layout->num_layers));
  const int flags = gather ? kWritable : 0;
  int32_t status = take_payloads(*python, payloads, *layout, frames, num_frames, flags, held, addresses.data(), fault);
  if (status == LMCK_OK) {
    void *state = python->save_thread();
    status = (gather ? lmck_gather : lmck_scatter)(layout, frames, num_frames, num_threads, fault);
    python->restore_thread(state);
  }
  held.release();
  return status;
} catch (const std::bad_alloc &) {
  return LMCK_NO_MEMORY;
}
