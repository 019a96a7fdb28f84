// The GPU check: correctness against loops that follow the engines' declarations, then rates beside plain copies.
//
//   check matrix SEED CASES     random shapes, fresh data, poisoned outputs; prints what failed
//   check staged SEED           what goes through the staged copies comes back
//   check rates                 tables
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

// An engine's declaration: axes outermost first, as in tests/matrix.py.
struct Case {
  std::string axes;
  int64_t layers, heads, blocks, block_slots, row_nbytes;
  int64_t offset, segment_offset;
  bool narrow_slots;
  std::vector<int64_t> slots;

  bool has(char axis) const { return axes.find(axis) != std::string::npos; }
  bool pair() const { return axes == "nshd" || axes == "hnsd"; }
  int64_t kinds() const { return has('l') ? 1 : 2; }
  int64_t num_slots() const { return blocks * block_slots; }
  int64_t size(char axis) const {
    switch (axis) {
      case 'c': return 2;
      case 'n': return blocks;
      case 's': return block_slots;
      case 'h': return heads;
      case 'e': return 2 * row_nbytes;
      default: return row_nbytes;
    }
  }
  int64_t stride(char axis) const {
    int64_t step = 1;
    for (size_t i = axes.size(); i-- > 0; step *= size(axes[i])) {
      if (axes[i] == axis) return step;
    }
    return 0;
  }
  int64_t tensor_nbytes() const { return stride(axes[0]) * size(axes[0]); }
  int64_t layer_nbytes() const { return (pair() ? 2 : 1) * (offset + tensor_nbytes()); }
  // Byte `byte` of K (kind 0) or V of one token and head, from the first byte of the layer.
  int64_t place(int64_t kind, int64_t head, int64_t slot, int64_t byte) const {
    const int64_t at[] = {kind, slot / block_slots, slot % block_slots, head, byte, kind * row_nbytes + byte, byte};
    const char *names = "cnshdel";
    int64_t place = offset + (pair() ? kind * (offset + tensor_nbytes()) : 0);
    for (char axis : axes) place += at[std::strchr(names, axis) - names] * stride(axis);
    return place;
  }
  int64_t segment_nbytes() const {
    return heads * static_cast<int64_t>(slots.size()) * kinds() * row_nbytes;
  }
};

Case random_case(std::mt19937_64 &rng, const std::string &axes) {
  const auto upto = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
  const int64_t rows[] = {1, 2, 6, 7, 8, 16, 24, 63, 64, 128, 256, 1024, 1152};
  const int64_t offsets[] = {0, 0, 0, 1, 2, 4, 8, 16};
  Case c{axes, 1 + upto(5), 1 + upto(5), 1 + upto(9), 1 + upto(17), rows[upto(13)], offsets[upto(8)], offsets[upto(8)],
         upto(2) == 0, {}};
  if (!c.has('h')) c.heads = 1;
  if (!c.has('s')) c.block_slots = 1;
  for (int64_t slot = 0; slot < c.num_slots(); ++slot) c.slots.push_back(slot);
  std::shuffle(c.slots.begin(), c.slots.end(), rng);
  c.slots.resize(static_cast<size_t>(1 + upto(c.num_slots())));
  if (upto(3) == 0) std::sort(c.slots.begin(), c.slots.end());
  if (upto(2) == 0) {
    for (int64_t &slot : c.slots) slot = upto(4) == 0 ? -1 : slot;
  }
  return c;
}

// The library's call for a case in device memory.
int32_t call(const Case &c, char *engine, char *payload, const void *slots, bool gather, unsigned long long *bad) {
  std::vector<lmck_plane> planes;
  std::vector<uint64_t> segments;
  const int64_t num_planes = c.has('e') || c.has('l') ? 1 : 2;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    for (int64_t p = 0; p < num_planes; ++p) {
      const uint64_t base = reinterpret_cast<uint64_t>(engine) + static_cast<uint64_t>(layer * c.layer_nbytes() + c.place(p, 0, 0, 0));
      planes.push_back({base, c.stride('h'), c.stride('n'), c.stride('s')});
    }
    segments.push_back(reinterpret_cast<uint64_t>(payload) +
                       static_cast<uint64_t>(layer * (c.segment_offset + c.segment_nbytes()) + c.segment_offset));
  }
  const lmck_layout layout{planes.data(), c.layers, num_planes, c.heads, c.num_slots(), c.block_slots,
                           c.kinds() * c.row_nbytes / num_planes, 0};
  const lmck_frame frame{slots, segments.data(), c.narrow_slots ? 4 : 8, 0, static_cast<int64_t>(c.slots.size())};
  lmck_fault fault{};
  const auto move = gather ? lmck_device_gather : lmck_device_scatter;
  return move(&layout, &frame, 1, nullptr, reinterpret_cast<uint64_t>(bad), &fault);
}

bool check_case(const Case &c, std::mt19937_64 &rng) {
  const size_t engine_nbytes = static_cast<size_t>(c.layers * c.layer_nbytes());
  const size_t payload_nbytes = static_cast<size_t>(c.layers * (c.segment_offset + c.segment_nbytes()));
  const int64_t num_tokens = static_cast<int64_t>(c.slots.size());
  std::vector<unsigned char> data(engine_nbytes), scattered(engine_nbytes, kPoison), gathered(payload_nbytes, kPoison);
  for (auto &byte : data) byte = static_cast<unsigned char>(rng());
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    unsigned char *segment = gathered.data() + layer * (c.segment_offset + c.segment_nbytes()) + c.segment_offset;
    for (int64_t head = 0; head < c.heads; ++head) {
      for (int64_t token = 0; token < num_tokens; ++token) {
        const int64_t slot = c.slots[static_cast<size_t>(token)];
        for (int64_t kind = 0; kind < c.kinds() && slot >= 0; ++kind) {
          for (int64_t byte = 0; byte < c.row_nbytes; ++byte) {
            const int64_t from = layer * c.layer_nbytes() + c.place(kind, head, slot, byte);
            segment[((head * num_tokens + token) * c.kinds() + kind) * c.row_nbytes + byte] = data[static_cast<size_t>(from)];
            scattered[static_cast<size_t>(from)] = data[static_cast<size_t>(from)];
          }
        }
      }
    }
  }
  Device<char> engine(engine_nbytes), payload(payload_nbytes);
  Device<int64_t> slots(c.slots.size());
  Device<unsigned long long> bad(1);
  must(cudaMemset(bad.at, 0, sizeof(unsigned long long)), "memset");
  if (c.narrow_slots) {
    const std::vector<int32_t> narrow(c.slots.begin(), c.slots.end());
    must(cudaMemcpy(slots.at, narrow.data(), narrow.size() * 4, cudaMemcpyHostToDevice), "slots");
  } else {
    must(cudaMemcpy(slots.at, c.slots.data(), c.slots.size() * 8, cudaMemcpyHostToDevice), "slots");
  }
  bool good = true;
  std::vector<unsigned char> got(std::max(engine_nbytes, payload_nbytes));
  for (const bool gather : {true, false}) {
    must(cudaMemcpy(engine.at, data.data(), engine_nbytes, cudaMemcpyHostToDevice), "engine");
    if (gather) {
      must(cudaMemset(payload.at, kPoison, payload_nbytes), "poison");
    } else {
      must(cudaMemset(engine.at, kPoison, engine_nbytes), "poison");
      must(cudaMemcpy(payload.at, gathered.data(), payload_nbytes, cudaMemcpyHostToDevice), "payload");
    }
    if (call(c, engine.at, payload.at, slots.at, gather, bad.at) != LMCK_OK) return false;
    must(cudaDeviceSynchronize(), "kernel");
    const auto &want = gather ? gathered : scattered;
    must(cudaMemcpy(got.data(), gather ? payload.at : engine.at, want.size(), cudaMemcpyDeviceToHost), "result");
    good = good && std::memcmp(got.data(), want.data(), want.size()) == 0;
  }
  unsigned long long num_bad = 0;
  must(cudaMemcpy(&num_bad, bad.at, sizeof num_bad, cudaMemcpyDeviceToHost), "bad slots");
  return good && num_bad == 0;
}

int matrix(uint64_t seed, int cases) {
  std::mt19937_64 rng(seed);
  int failed = 0, done = 0;
  for (const char *axes : {"cnshd", "ncshd", "cnhsd", "nchsd", "nhse", "nshe", "nshd", "hnsd", "nsl", "nl"}) {
    for (int i = 0; i < cases; ++i, ++done) {
      const Case c = random_case(rng, axes);
      if (check_case(c, rng)) continue;
      ++failed;
      std::printf("FAILED %s case %d: layers %ld heads %ld blocks %ld block slots %ld row %ld offsets %ld %ld\n", axes, i,
                  (long)c.layers, (long)c.heads, (long)c.blocks, (long)c.block_slots, (long)c.row_nbytes, (long)c.offset,
                  (long)c.segment_offset);
    }
  }
  std::printf("matrix, seed %llu: %d of %d cases as the reference says\n", (unsigned long long)seed, done - failed, done);
  return failed != 0;
}

// GB/s of `bytes` moved by `work` on the stream: the median of 15 timed runs after 3.
double rate(double bytes, cudaStream_t stream, const std::function<void(int)> &work) {
  cudaEvent_t start, stop;
  must(cudaEventCreate(&start), "event");
  must(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  for (int run = -3; run < 15; ++run) {
    must(cudaEventRecord(start, stream), "record");
    work(run + 3);
    must(cudaEventRecord(stop, stream), "record");
    must(cudaEventSynchronize(stop), "kernel");
    float milliseconds = 0;
    must(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    if (run >= 0) times.push_back(milliseconds);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::nth_element(times.begin(), times.begin() + 7, times.end());
  return bytes / (times[7] * 1e6);
}

// Of an 8B shape, 8 heads of 128, bf16, packed [blocks, heads, slots, 2 dim]; random pages, other ones each run. As many
// layers, 32 at most, as leave a frame one whole page or more in each.
int rates() {
  constexpr int64_t kLayers = 32, kHeads = 8, kRow = 512, kTokens = 65536;
  constexpr int64_t kLayerNbytes = kTokens * kHeads * kRow;
  constexpr int64_t kMost = 32 << 20;
  Device<char> engine(static_cast<size_t>(kLayers * kLayerNbytes)), staging(static_cast<size_t>(8 * kMost));
  must(cudaMemset(engine.at, 1, static_cast<size_t>(kLayers * kLayerNbytes)), "engine");
  char *pinned = nullptr;
  must(cudaHostAlloc(&pinned, static_cast<size_t>(2 * kMost), cudaHostAllocDefault), "pinned memory");
  std::memset(pinned, 1, static_cast<size_t>(2 * kMost));
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::mt19937_64 rng(7);

  std::printf("\nGB/s of payload; a device-to-device copy of the same bytes beside it, in the same run\n");
  std::printf("| frame | layers | page | gather | scatter | plain D2D | gather + D2H | H2D + scatter | pinned D2H | pinned H2D |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|\n");
  for (const int64_t mib : {1, 4, 32}) {
    for (const int64_t page : {16, 128}) {
      const int64_t nbytes = mib << 20, layers = std::min(kLayers, nbytes / (page * kHeads * kRow));
      const int64_t num_tokens = nbytes / (layers * kHeads * kRow);
      std::vector<lmck_plane> planes;
      for (int64_t l = 0; l < layers; ++l) {
        const uint64_t base = reinterpret_cast<uint64_t>(engine.at) + static_cast<uint64_t>(l * kLayerNbytes);
        planes.push_back({base, page * kRow, page * kHeads * kRow, kRow});
      }
      const lmck_layout layout{planes.data(), layers, 1, kHeads, kTokens, page, kRow, 0};
      constexpr int kWays = 8;  // other pages and another staging place each run
      Device<int64_t> slots(static_cast<size_t>(kWays * num_tokens));
      std::vector<int64_t> host(static_cast<size_t>(kWays * num_tokens));
      for (int way = 0; way < kWays; ++way) {
        for (int64_t t = 0; t < num_tokens; t += page) {
          const int64_t block = static_cast<int64_t>(rng() % static_cast<uint64_t>(kTokens / page / kWays)) * kWays + way;
          for (int64_t i = t; i < std::min(t + page, num_tokens); ++i) host[static_cast<size_t>(way * num_tokens + i)] = block * page + i - t;
        }
      }
      must(cudaMemcpy(slots.at, host.data(), host.size() * 8, cudaMemcpyHostToDevice), "slots");
      const auto move = [&](int run, bool gather) {
        const int way = run % kWays;
        std::vector<uint64_t> segments;
        for (int64_t l = 0; l < layers; ++l) {
          segments.push_back(reinterpret_cast<uint64_t>(staging.at) + static_cast<uint64_t>(way * kMost + l * (nbytes / layers)));
        }
        const lmck_frame frame{slots.at + way * num_tokens, segments.data(), 8, 0, num_tokens};
        lmck_fault fault{};
        const auto function = gather ? lmck_device_gather : lmck_device_scatter;
        if (function(&layout, &frame, 1, stream, 0, &fault) != LMCK_OK) std::exit(2);
      };
      const auto size = static_cast<size_t>(nbytes);
      const double bytes = static_cast<double>(nbytes);
      const auto at = [&](int run) { return staging.at + (run % kWays) * kMost; };
      const double results[] = {
          rate(bytes, stream, [&](int run) { move(run, true); }),
          rate(bytes, stream, [&](int run) { move(run, false); }),
          rate(bytes, stream, [&](int run) { cudaMemcpyAsync(at(run), engine.at + run * kMost, size, cudaMemcpyDeviceToDevice, stream); }),
          rate(bytes, stream, [&](int run) { move(run, true); cudaMemcpyAsync(pinned, at(run), size, cudaMemcpyDeviceToHost, stream); }),
          rate(bytes, stream, [&](int run) { cudaMemcpyAsync(at(run), pinned, size, cudaMemcpyHostToDevice, stream); move(run, false); }),
          rate(bytes, stream, [&](int run) { cudaMemcpyAsync(pinned, at(run), size, cudaMemcpyDeviceToHost, stream); }),
          rate(bytes, stream, [&](int run) { cudaMemcpyAsync(at(run), pinned, size, cudaMemcpyHostToDevice, stream); }),
      };
      std::printf("| %ld MiB | %ld | %ld |", (long)mib, (long)layers, (long)page);
      for (const double result : results) std::printf(" %.1f |", result);
      std::printf("\n");
    }
  }
  std::printf("\nGB/s by message size, pinned memory\n| bytes | D2H | H2D |\n|---|---|---|\n");
  for (int64_t nbytes = 16 << 10; nbytes <= kMost; nbytes *= 2) {
    const auto size = static_cast<size_t>(nbytes);
    const double bytes = static_cast<double>(nbytes);
    const double out = rate(bytes, stream, [&](int) { cudaMemcpyAsync(pinned, staging.at, size, cudaMemcpyDeviceToHost, stream); });
    const double in = rate(bytes, stream, [&](int) { cudaMemcpyAsync(staging.at, pinned, size, cudaMemcpyHostToDevice, stream); });
    std::printf("| %ld KiB | %.1f | %.1f |\n", (long)(nbytes >> 10), out, in);
  }
  must(cudaDeviceSynchronize(), "rates");
  cudaFreeHost(pinned);
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 4 && std::strcmp(argv[1], "matrix") == 0) return matrix(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
  if (argc == 3 && std::strcmp(argv[1], "staged") == 0) return staged(std::strtoull(argv[2], nullptr, 10));
  if (argc == 2 && std::strcmp(argv[1], "rates") == 0) return rates();
  std::fprintf(stderr, "check matrix SEED CASES | check staged SEED | check rates\n");
  return 2;
}
