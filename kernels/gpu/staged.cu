// Of the GPU check: what goes through the staged copies comes back, and how fast.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"

namespace {

void good(int32_t error, const char *what) { must(static_cast<cudaError_t>(error), what); }

// The staged copies of lmcache_core/kernels/staging.py: kernels on the engine's stream, copies on one of ours, two
// places, an event for each time that a place is filled and emptied.
struct Staged {
  uint64_t engine = 0, ours = 0, memory = 0, filled[2] = {}, emptied[2] = {};
  int64_t place_nbytes;
  int turn = 0;

  explicit Staged(int64_t nbytes) : place_nbytes(nbytes) {
    good(lmck_stream_create(&engine), "stream");
    good(lmck_stream_create(&ours), "stream");
    good(lmck_device_allocate(2 * nbytes, &memory), "staging");
    for (int i = 0; i < 2; ++i) {
      good(lmck_event_create(&filled[i]), "event");
      good(lmck_event_create(&emptied[i]), "event");
    }
  }
  ~Staged() {
    lmck_stream_drain(engine);
    lmck_stream_drain(ours);
    for (int i = 0; i < 2; ++i) {
      lmck_event_destroy(filled[i]);
      lmck_event_destroy(emptied[i]);
    }
    lmck_device_free(memory);
    lmck_stream_destroy(ours);
    lmck_stream_destroy(engine);
  }

  // Layer by layer between the engine's memory and `host`, which has the layers one behind the other.
  void move(const lmck_layout &all, const void *slots, int64_t num_tokens, char *host, bool gather) {
    const int64_t nbytes = num_tokens * all.num_heads * all.num_planes * all.row_nbytes;
    for (int64_t layer = 0; layer < all.num_layers; ++layer, turn ^= 1) {
      lmck_layout one = all;
      one.planes += layer * all.num_planes;
      one.num_layers = 1;
      const uint64_t place = memory + static_cast<uint64_t>(turn * place_nbytes);
      const uint64_t segment = reinterpret_cast<uint64_t>(host) + static_cast<uint64_t>(layer * nbytes);
      const lmck_frame frame{slots, &place, 8, 0, num_tokens};
      lmck_fault fault{};
      auto *stream = reinterpret_cast<void *>(engine);
      int32_t status = LMCK_OK;
      if (gather) {
        good(lmck_stream_follow(engine, emptied[turn]), "follow");
        status = lmck_device_gather(&one, &frame, 1, stream, 0, &fault);
        good(lmck_event_record(filled[turn], engine), "record");
        good(lmck_stream_follow(ours, filled[turn]), "follow");
        good(lmck_copy_rows(segment, nbytes, place, nbytes, nbytes, 1, ours), "copy");
        good(lmck_event_record(emptied[turn], ours), "record");
      } else {
        good(lmck_stream_follow(ours, emptied[turn]), "follow");
        good(lmck_copy_rows(place, nbytes, segment, nbytes, nbytes, 1, ours), "copy");
        good(lmck_event_record(filled[turn], ours), "record");
        good(lmck_stream_follow(engine, filled[turn]), "follow");
        status = lmck_device_scatter(&one, &frame, 1, stream, 0, &fault);
        good(lmck_event_record(emptied[turn], engine), "record");
      }
      if (status != LMCK_OK) {
        std::fprintf(stderr, "staged launch: status %d, CUDA error %ld\n", status, (long)fault.value);
        std::exit(2);
      }
    }
    for (const uint64_t event : {filled[0], filled[1], emptied[0], emptied[1]}) good(lmck_event_wait(event), "wait");
  }
};

}  // namespace

// An 8B shape as in `rates`, of fewer slots; memory registered as the pool's is. Random pages out of one engine and
// into another: each byte is compared with the source's, each other byte with the poison. Then the rates.
int staged(uint64_t seed) {
  constexpr int64_t kLayers = 32, kHeads = 8, kRow = 512, kPage = 16, kSlots = 16384;
  constexpr int64_t kLayerNbytes = kSlots * kHeads * kRow;
  constexpr auto kEngineNbytes = static_cast<size_t>(kLayers * kLayerNbytes);
  constexpr size_t kHostNbytes = 256 << 20;
  std::mt19937_64 rng(seed);
  std::vector<uint64_t> source(kEngineNbytes / 8);
  for (auto &word : source) word = rng();
  Device<char> from(kEngineNbytes), to(kEngineNbytes);
  must(cudaMemcpy(from.at, source.data(), kEngineNbytes, cudaMemcpyHostToDevice), "engine");
  auto *host = static_cast<char *>(std::aligned_alloc(2 << 20, kHostNbytes));
  good(lmck_host_register(reinterpret_cast<uint64_t>(host), static_cast<int64_t>(kHostNbytes)), "register");
  const auto layout_of = [&](char *engine, std::vector<lmck_plane> &planes) {
    for (int64_t l = 0; l < kLayers; ++l) {
      planes.push_back({reinterpret_cast<uint64_t>(engine) + static_cast<uint64_t>(l * kLayerNbytes), kPage * kRow,
                        kPage * kHeads * kRow, kRow});
    }
    return lmck_layout{planes.data(), kLayers, 1, kHeads, kSlots, kPage, kRow, 0};
  };
  std::vector<lmck_plane> from_planes, to_planes;
  const lmck_layout from_layout = layout_of(from.at, from_planes), to_layout = layout_of(to.at, to_planes);
  int failed = 0;
  std::printf("\nstaged copies, layer by layer, GB/s of payload by the host's clock\n");
  std::printf("| frame | gather to pinned frames | scatter from pinned frames | bytes |\n|---|---|---|---|\n");
  for (const int64_t num_tokens : {16, 256, 1024, 2048}) {
    const int64_t nbytes = num_tokens * kHeads * kRow * kLayers;
    std::vector<int64_t> pages(kSlots / kPage), slots;
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int64_t>(i);
    std::shuffle(pages.begin(), pages.end(), rng);
    for (int64_t t = 0; t < num_tokens; ++t) slots.push_back(pages[static_cast<size_t>(t / kPage)] * kPage + t % kPage);
    Device<int64_t> on_device(slots.size());
    must(cudaMemcpy(on_device.at, slots.data(), slots.size() * 8, cudaMemcpyHostToDevice), "slots");
    must(cudaMemset(to.at, kPoison, kEngineNbytes), "poison");
    must(cudaDeviceSynchronize(), "poison");
    std::memset(host, kPoison, kHostNbytes);
    Staged lane(nbytes / kLayers);
    double rates[2] = {};
    for (const bool gather : {true, false}) {
      std::vector<double> seconds;
      for (int run = 0; run < 7; ++run) {
        const auto start = std::chrono::steady_clock::now();
        lane.move(gather ? from_layout : to_layout, on_device.at, num_tokens, host, gather);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      std::nth_element(seconds.begin(), seconds.begin() + 3, seconds.end());
      rates[gather ? 0 : 1] = static_cast<double>(nbytes) / seconds[3] / 1e9;
    }
    std::vector<unsigned char> got(kEngineNbytes), want(kEngineNbytes, kPoison);
    must(cudaMemcpy(got.data(), to.at, kEngineNbytes, cudaMemcpyDeviceToHost), "result");
    const auto *bytes = reinterpret_cast<const unsigned char *>(source.data());
    for (int64_t l = 0; l < kLayers; ++l) {
      for (int64_t t = 0; t < num_tokens; t += kPage) {  // a page is a run of bytes in this layout
        const int64_t at = l * kLayerNbytes + slots[static_cast<size_t>(t)] * kHeads * kRow;
        std::memcpy(want.data() + at, bytes + at, static_cast<size_t>(kPage * kHeads * kRow));
      }
    }
    const bool right = got == want;
    failed += !right;
    std::printf("| %ld MiB | %.1f | %.1f | %s |\n", (long)(nbytes >> 20), rates[0], rates[1], right ? "right" : "WRONG");
  }
  good(lmck_host_unregister(reinterpret_cast<uint64_t>(host)), "unregister");
  std::free(host);
  return failed != 0;
}
