// Gather and scatter on the host: the checks, the runs of tokens that lie in a row, and the threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "isa.h"
#include "paged.cuh"

namespace lmck {
namespace {

// Below this many bytes a call stays in the caches, and on the calling thread.
constexpr int64_t kStreamNbytes = 1 << 20;
constexpr int64_t kThreadNbytes = 4 << 20;

#ifdef LMCK_X86
constexpr const Instructions *kAll[] = {&kBaseline, &kAvx2, &kAvx512};
#else
constexpr const Instructions *kAll[] = {&kBaseline};
#endif

bool runs_here(const Instructions *set) {
#ifdef LMCK_X86
  if (set == &kAvx512) return __builtin_cpu_supports("avx512f");
  if (set == &kAvx2) return __builtin_cpu_supports("avx2");
#endif
  return set == &kBaseline;
}

std::atomic<const Instructions *> &chosen() {
  static std::atomic<const Instructions *> set{[] {
    const Instructions *best = &kBaseline;
    for (const Instructions *set : kAll) best = runs_here(set) ? set : best;
    return best;
  }()};
  return set;
}

const Instructions &instructions() { return *chosen().load(std::memory_order_relaxed); }

int32_t report(lmck_fault *fault, int32_t status, int64_t frame, int64_t place, int64_t value) {
  if (fault != nullptr) *fault = lmck_fault{frame, place, value};
  return status;
}

// Tokens whose slots follow each other inside a block.
struct Run {
  int64_t token, block, place, count;
};

// A slot as it is now. Engines use the memory of slots again: it is read once, and what was read is checked and used.
int64_t read_slot(const Shape &shape, int64_t token) {
  if (shape.slots == nullptr) return shape.first_slot + token;
  if (shape.slot_nbytes == 4) return __atomic_load_n(static_cast<const int32_t *>(shape.slots) + token, __ATOMIC_RELAXED);
  return __atomic_load_n(static_cast<const int64_t *>(shape.slots) + token, __ATOMIC_RELAXED);
}

// The runs of every frame, all slots checked; with `unique`, that none is named twice by any of them.
int32_t read_runs(const lmck_layout &layout, const lmck_frame *frames, int64_t num_frames, bool unique,
                  std::vector<std::vector<Run>> &runs, lmck_fault *fault) {
  std::vector<uint64_t> seen(unique ? static_cast<size_t>(layout.num_slots / 64 + 1) : 0);
  for (int64_t f = 0; f < num_frames; ++f) {
    const Shape shape = shape_of(layout, frames[f]);
    std::vector<Run> &found = runs.emplace_back();
    int64_t next = kHole;  // the slot that would lengthen the last run
    for (int64_t token = 0; token < shape.num_tokens; ++token) {
      const int64_t slot = read_slot(shape, token);
      if (slot == kHole && shape.slots != nullptr) {
        next = kHole;
        continue;
      }
      if (!is_slot(shape, slot)) return report(fault, LMCK_BAD_SLOT, f, token, slot);
      if (unique) {
        uint64_t &word = seen[static_cast<size_t>(slot / 64)];
        const uint64_t bit = uint64_t{1} << (slot % 64);
        if (word & bit) return report(fault, LMCK_SLOT_TWICE, f, token, slot);
        word |= bit;
      }
      const int64_t block = slot / shape.block_slots, place = slot - block * shape.block_slots;
      if (slot == next && place != 0) {
        ++found.back().count;
      } else {
        found.push_back({token, block, place, 1});
      }
      next = slot + 1;
    }
  }
  return LMCK_OK;
}

struct Extent {
  uint64_t first, end;
  int64_t frame, layer;
  uint64_t reach;  // the furthest end of this and those before, in the order of their first bytes
};

// Segments may not overlap the engine's memory, nor, where they are written, each other.
int32_t check_overlap(const lmck_layout &layout, const lmck_frame *frames, int64_t num_frames, bool gather,
                      lmck_fault *fault) {
  std::vector<Extent> segments;
  segments.reserve(static_cast<size_t>(num_frames * layout.num_layers));
  for (int64_t f = 0; f < num_frames; ++f) {
    const int64_t nbytes = layout.num_heads * frames[f].num_tokens * content_nbytes(layout);
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      const uint64_t first = frames[f].segments[layer];
      segments.push_back({first, first + static_cast<uint64_t>(nbytes), f, layer, 0});
    }
  }
  const auto before = [](const Extent &a, const Extent &b) { return a.first < b.first; };
  if (!std::is_sorted(segments.begin(), segments.end(), before)) std::sort(segments.begin(), segments.end(), before);
  uint64_t reach = 0;
  for (Extent &segment : segments) {
    if (gather && segment.first < reach) return report(fault, LMCK_OVERLAP, segment.frame, segment.layer, 0);
    segment.reach = reach = std::max(reach, segment.end);
  }
  const int64_t last_block = (layout.num_slots - 1) / layout.block_slots;
  const int64_t last_place = std::min(layout.num_slots, layout.block_slots) - 1;
  for (int64_t i = 0; i < layout.num_layers * layout.num_planes; ++i) {
    const lmck_plane &plane = layout.planes[i];
    const uint64_t end = plane.base + static_cast<uint64_t>((layout.num_heads - 1) * plane.head_stride +
                                                            last_block * plane.block_stride +
                                                            last_place * plane.slot_stride + layout.row_nbytes);
    // Those before it end too early. If it begins too late, so do those behind it.
    auto next = std::partition_point(segments.begin(), segments.end(),
                                     [&](const Extent &s) { return s.reach <= plane.base; });
    if (next != segments.end() && next->first < end) {
      return report(fault, LMCK_OVERLAP, next->frame, next->layer, 1);
    }
  }
  return LMCK_OK;
}

// Joins rows that follow each other on both sides into longer ones.
void join_rows(Box &box) {
  Axis kept[3] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  int next = 2;
  for (int i = 2; i >= 0; --i) {
    const Axis &axis = box.axes[i];
    if (axis.count == 1) continue;
    if (next == 2 && axis.to_stride == box.row_nbytes && axis.from_stride == box.row_nbytes) {
      box.row_nbytes *= axis.count;
    } else {
      kept[next--] = axis;
    }
  }
  std::copy(kept, kept + 3, box.axes);
}

// One layer of one frame.
void move_layer(const Shape &shape, const std::vector<Run> &runs, const lmck_plane *planes, uint64_t segment,
                bool gather, bool stream) {
  const auto copy = instructions().copy;
  const bool alike = shape.num_planes == 2 && planes[0].head_stride == planes[1].head_stride &&
                     planes[0].block_stride == planes[1].block_stride && planes[0].slot_stride == planes[1].slot_stride;
  const int64_t joined = alike ? 2 : 1;  // K and V differ in their base alone: one box has both
  const int64_t content = shape.num_planes * shape.row_nbytes;
  for (const Run &run : runs) {
    for (int64_t p = 0; p < shape.num_planes; p += joined) {
      const uint64_t paged = paged_row(planes[p], 0, run.block, run.place);
      const uint64_t packed = packed_row(shape, segment, 0, run.token, p);
      const Axis heads{shape.num_heads, shape.num_tokens * content, planes[p].head_stride};
      const Axis tokens{run.count, content, planes[p].slot_stride};
      const int64_t apart = alike ? static_cast<int64_t>(planes[1].base - planes[0].base) : 0;
      // Measured (docs/adr/0007): reads are quickest in the order of the engine's memory, and where the reads are of a
      // frame, whose heads are streams of their own, a token at a time.
      const bool by_head = gather && planes[p].head_stride > planes[p].slot_stride;
      Box box{packed, paged, shape.row_nbytes,
              {by_head ? heads : tokens, by_head ? tokens : heads, {joined, shape.row_nbytes, apart}}};
      if (!gather) {
        std::swap(box.to, box.from);
        for (Axis &axis : box.axes) std::swap(axis.to_stride, axis.from_stride);
      }
      join_rows(box);
      copy(box, stream);
    }
  }
}

// One layer of one frame, from bfloat16 to float8 with a scale for each K and V of a token and head, or back.
void convert_layer(const Shape &shape, const std::vector<Run> &runs, const lmck_plane *planes, uint64_t segment,
                   int64_t dim, bool gather) {
  const Instructions &with = instructions();
  for (const Run &run : runs) {
    for (int64_t i = 0; i < run.count; ++i) {
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        const int64_t content = (head * shape.num_tokens + run.token + i) * (2 * dim + 8);
        uint8_t *packed = reinterpret_cast<uint8_t *>(segment) + content;
        for (int64_t kind = 0; kind < 2; ++kind) {
          const bool apart = shape.num_planes == 2;
          uint8_t *paged = reinterpret_cast<uint8_t *>(
              paged_row(planes[apart ? kind : 0], head, run.block, run.place + i));
          if (!apart) paged += kind * dim * 2;
          uint8_t *scale_at = packed + 2 * dim + 4 * kind;
          if (gather) {
            const float scale = with.narrow(packed + kind * dim, paged, dim);
            std::memcpy(scale_at, &scale, sizeof scale);
          } else {
            float scale;
            std::memcpy(&scale, scale_at, sizeof scale);
            with.widen(paged, packed + kind * dim, dim, scale);
          }
        }
      }
    }
  }
}

// Runs `work(i)` for every i below `count`, on this thread and at most `num_threads - 1` more. It must not throw.
template <typename Work>
void in_parallel(int64_t count, int64_t num_threads, const Work &work) {
  std::atomic<int64_t> next{0};
  const auto take = [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    instructions().fence();
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min(num_threads, count); ++i) {
    try {
      helpers.emplace_back(take);
    } catch (const std::exception &) {  // no more threads or memory: those there are do it all
      break;
    }
  }
  take();
  for (std::thread &helper : helpers) helper.join();
}

int32_t move(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames, int32_t num_threads, bool gather,
             lmck_fault *fault) try {
  if (!is_sound(*layout) || num_frames < 0) return LMCK_BAD_SHAPE;
  for (int64_t f = 0; f < num_frames; ++f) {
    if (!is_sound(frames[f])) return LMCK_BAD_SHAPE;
  }
  std::vector<std::vector<Run>> runs;
  if (const int32_t status = read_runs(*layout, frames, num_frames, !gather, runs, fault)) return status;
  if (const int32_t status = check_overlap(*layout, frames, num_frames, gather, fault)) return status;

  std::vector<Shape> shapes;
  int64_t num_tokens = 0;
  for (int64_t f = 0; f < num_frames; ++f) {
    shapes.push_back(shape_of(*layout, frames[f]));
    num_tokens += frames[f].num_tokens;
  }
  const int64_t nbytes = num_tokens * layout->num_layers * layout->num_heads * content_nbytes(*layout);
  const bool stream = nbytes >= kStreamNbytes;
  in_parallel(num_frames * layout->num_layers, nbytes >= kThreadNbytes ? num_threads : 1, [&](int64_t i) {
    const int64_t f = i / layout->num_layers, layer = i % layout->num_layers;
    const auto &shape = shapes[static_cast<size_t>(f)];
    const auto &runs_here = runs[static_cast<size_t>(f)];
    const lmck_plane *planes = layout->planes + layer * layout->num_planes;
    if (layout->narrow) {
      convert_layer(shape, runs_here, planes, frames[f].segments[layer], layout->narrow, gather);
    } else {
      move_layer(shape, runs_here, planes, frames[f].segments[layer], gather, stream);
    }
  });
  return LMCK_OK;
} catch (const std::bad_alloc &) {
  return LMCK_NO_MEMORY;
}

template <typename Word, bool kGather>
int64_t twin(const lmck_layout &layout, const lmck_frame &frame) {
  const Shape shape = shape_of(layout, frame);
  const int64_t words = shape.num_planes * shape.row_nbytes / static_cast<int64_t>(sizeof(Word));
  int64_t num_bad_slots = 0;
  for (int64_t token = 0; token < shape.num_tokens; ++token) {
    const int64_t slot = slot_of(shape, token);
    if (!is_slot(shape, slot)) {
      num_bad_slots += slot != kHole;
      continue;
    }
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        for (int64_t word = 0; word < words; ++word) {
          move_word<Word, kGather>(shape, layout.planes + layer * layout.num_planes, frame.segments[layer], head,
                                   token, slot, word);
        }
      }
    }
  }
  return num_bad_slots;
}

template <bool kGather>
int32_t twin_of_widest_word(const lmck_layout *layout, const lmck_frame *frame, int64_t *num_bad_slots) {
  if (!is_sound(*layout) || !is_sound(*frame) || layout->narrow) return LMCK_BAD_SHAPE;
  switch (word_nbytes(*layout, *frame)) {
    case 16: *num_bad_slots = twin<Word16, kGather>(*layout, *frame); break;
    case 8: *num_bad_slots = twin<uint64_t, kGather>(*layout, *frame); break;
    case 4: *num_bad_slots = twin<uint32_t, kGather>(*layout, *frame); break;
    case 2: *num_bad_slots = twin<uint16_t, kGather>(*layout, *frame); break;
    default: *num_bad_slots = twin<uint8_t, kGather>(*layout, *frame);
  }
  return LMCK_OK;
}

}  // namespace
}  // namespace lmck

extern "C" {

int32_t lmck_abi(void) { return LMCK_ABI; }

const char *lmck_instructions(void) { return lmck::instructions().name; }

int32_t lmck_use_instructions(const char *name) {
  for (const lmck::Instructions *set : lmck::kAll) {
    if (std::strcmp(set->name, name) == 0 && lmck::runs_here(set)) {
      lmck::chosen().store(set, std::memory_order_relaxed);
      return 1;
    }
  }
  return 0;
}

int32_t lmck_gather(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames, int32_t num_threads,
                    lmck_fault *fault) {
  return lmck::move(layout, frames, num_frames, num_threads, true, fault);
}

int32_t lmck_scatter(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames, int32_t num_threads,
                     lmck_fault *fault) {
  return lmck::move(layout, frames, num_frames, num_threads, false, fault);
}

int32_t lmck_gather_twin(const lmck_layout *layout, const lmck_frame *frame, int64_t *num_bad_slots) {
  return lmck::twin_of_widest_word<true>(layout, frame, num_bad_slots);
}

int32_t lmck_scatter_twin(const lmck_layout *layout, const lmck_frame *frame, int64_t *num_bad_slots) {
  return lmck::twin_of_widest_word<false>(layout, frame, num_bad_slots);
}

uint64_t lmck_checksum(const void *memory, int64_t nbytes) { return lmck::instructions().checksum(memory, nbytes); }
}
