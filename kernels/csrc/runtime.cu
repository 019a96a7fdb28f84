// What staged copies need of CUDA beside the launches: memory, streams, events, copies. Each call is one of CUDA's.
#include <cuda_runtime.h>

#include "lmcache_core_kernels.h"

namespace {

void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }
cudaStream_t stream_of(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(uint64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

}  // namespace

extern "C" {

int32_t lmck_device_current(int32_t *device) { return cudaGetDevice(device); }

int32_t lmck_host_register(uint64_t address, int64_t nbytes) {
  const cudaError_t error =
      cudaHostRegister(pointer(address), static_cast<size_t>(nbytes), cudaHostRegisterPortable);
  if (error != cudaSuccess) cudaGetLastError();  // told here: the next launch is not to blame
  return error;
}

int32_t lmck_host_unregister(uint64_t address) {
  const cudaError_t error = cudaHostUnregister(pointer(address));
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

int32_t lmck_device_allocate(int64_t nbytes, uint64_t *address) {
  void *memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(nbytes));
  if (error != cudaSuccess) cudaGetLastError();
  *address = reinterpret_cast<uint64_t>(memory);
  return error;
}

int32_t lmck_device_free(uint64_t address) { return cudaFree(pointer(address)); }

int32_t lmck_stream_create(uint64_t *stream) {
  cudaStream_t created = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
  *stream = reinterpret_cast<uint64_t>(created);
  return error;
}

int32_t lmck_stream_destroy(uint64_t stream) { return cudaStreamDestroy(stream_of(stream)); }

int32_t lmck_stream_follow(uint64_t stream, uint64_t event) {
  return cudaStreamWaitEvent(stream_of(stream), event_of(event), 0);
}

int32_t lmck_stream_drain(uint64_t stream) { return cudaStreamSynchronize(stream_of(stream)); }

int32_t lmck_event_create(uint64_t *event) {
  cudaEvent_t created = nullptr;
  // Blocking: a host that waits sleeps, and leaves its core to the engine.
  const cudaError_t error = cudaEventCreateWithFlags(&created, cudaEventDisableTiming | cudaEventBlockingSync);
  *event = reinterpret_cast<uint64_t>(created);
  return error;
}

int32_t lmck_event_destroy(uint64_t event) { return cudaEventDestroy(event_of(event)); }

int32_t lmck_event_record(uint64_t event, uint64_t stream) {
  return cudaEventRecord(event_of(event), stream_of(stream));
}

int32_t lmck_event_query(uint64_t event, int32_t *done) {
  const cudaError_t error = cudaEventQuery(event_of(event));
  *done = error == cudaSuccess;
  if (error != cudaErrorNotReady) return error;
  cudaGetLastError();
  return cudaSuccess;
}

int32_t lmck_event_wait(uint64_t event) { return cudaEventSynchronize(event_of(event)); }

int32_t lmck_copy_rows(uint64_t to, int64_t to_pitch, uint64_t from, int64_t from_pitch, int64_t row_nbytes,
                       int64_t num_rows, uint64_t stream) {
  const auto width = static_cast<size_t>(row_nbytes), rows = static_cast<size_t>(num_rows);
  if (num_rows == 1 || (to_pitch == row_nbytes && from_pitch == row_nbytes)) {
    return cudaMemcpyAsync(pointer(to), pointer(from), width * rows, cudaMemcpyDefault, stream_of(stream));
  }
  return cudaMemcpy2DAsync(pointer(to), static_cast<size_t>(to_pitch), pointer(from), static_cast<size_t>(from_pitch),
                           width, rows, cudaMemcpyDefault, stream_of(stream));
}
}
