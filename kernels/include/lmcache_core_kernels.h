/* The C ABI of lmcache-core-kernels: moving KV between an engine's paged memory and frame payloads.
 *
 * No framework, no Python: addresses, strides in bytes, and counts. Every function is thread-safe, keeps
 * nothing, and returns LMCK_OK or says what is wrong before it has written a byte.
 */
#ifndef LMCACHE_CORE_KERNELS_H
#define LMCACHE_CORE_KERNELS_H

#include <stdint.h>

#define LMCK_ABI 3
#define LMCK_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum lmck_status {
  LMCK_OK = 0,
  LMCK_BAD_SLOT = 1,  /* fault: frame, token, slot; neither -1 nor among num_slots */
  LMCK_SLOT_TWICE = 2, /* fault: frame, token, slot; a scatter would write it twice */
  LMCK_OVERLAP = 3,   /* fault: frame, layer; the segment overlaps another one or the engine's memory */
  LMCK_BAD_SHAPE = 4, /* a count that is not positive, or more planes than two */
  LMCK_NO_MEMORY = 5,
  LMCK_CUDA = 6,      /* fault.value: the cudaError_t */
  LMCK_NUM_LAYERS = 7, /* fault: frame, -, number of objects in its payload */
  LMCK_BAD_SEGMENT = 8, /* fault: frame, layer, number of bytes found */
  LMCK_RAISED = 9,    /* Python has the exception */
};

/* Where one layer keeps K, V, or both of every token: row [head][slot], row_nbytes without gaps, lies at
 * base + head * head_stride + slot / block_slots * block_stride + slot % block_slots * slot_stride. */
typedef struct lmck_plane {
  uint64_t base;
  int64_t head_stride, block_stride, slot_stride; /* bytes */
} lmck_plane;

typedef struct lmck_layout {
  const lmck_plane *planes; /* [num_layers][num_planes] */
  int64_t num_layers;
  int64_t num_planes; /* 2 where K and V lie apart, else 1 */
  int64_t num_heads, num_slots, block_slots;
  int64_t row_nbytes; /* of one token and head in one plane */
  int64_t narrow; /* 0: bytes are moved as they are; else the dim of K and V: see below */
} lmck_layout;

/* One chunk: token i lies in slots[i], -1 being a hole that is skipped, or in first_slot + i without slots.
 * A segment is [heads, tokens, planes, row_nbytes] without gaps.
 *
 * With `narrow` = dim, K and V are dim bfloat16 each in the engine's memory, and in a segment a token and head are dim
 * float8_e4m3fn of K, dim of V, then float32 scales of K and of V, little-endian, at any alignment: a value is its
 * float8 times its scale, and a scale is the largest magnitude / 448, at least 2^-126. A K or V that has a value which
 * is no finite number becomes NaN as a whole. On the host only. */
typedef struct lmck_frame {
  const void *slots; /* int32_t or int64_t, or NULL */
  const uint64_t *segments; /* addresses, one a layer */
  int64_t slot_nbytes; /* 4 or 8 */
  int64_t first_slot;
  int64_t num_tokens;
} lmck_frame;

typedef struct lmck_fault {
  int64_t frame, place, value;
} lmck_fault;

LMCK_EXPORT int32_t lmck_abi(void);
/* The instruction set that the running processor is served with: "avx512", "avx2" or "baseline". */
LMCK_EXPORT const char *lmck_instructions(void);
/* Serves with another set from now on; 0 where the processor or the build lacks it. For tests and comparisons. */
LMCK_EXPORT int32_t lmck_use_instructions(const char *name);

LMCK_EXPORT int32_t lmck_gather(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames,
                                int32_t num_threads, lmck_fault *fault);
LMCK_EXPORT int32_t lmck_scatter(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames,
                                 int32_t num_threads, lmck_fault *fault);

/* The device's kernel body run on the host, word by word: index arithmetic that is tested without a GPU.
 * Checks nothing that the device can't check: a slot out of bounds is skipped and counted in *num_bad_slots. */
LMCK_EXPORT int32_t lmck_gather_twin(const lmck_layout *layout, const lmck_frame *frame, int64_t *num_bad_slots);
LMCK_EXPORT int32_t lmck_scatter_twin(const lmck_layout *layout, const lmck_frame *frame, int64_t *num_bad_slots);

/* What the next function asks of Python, by address, so that the library is linked against none: PyObject_GetBuffer,
 * PyBuffer_Release, PyTuple_Size, PyTuple_GetItem, PyEval_SaveThread, PyEval_RestoreThread. */
typedef struct lmck_python {
  int (*get_buffer)(void *object, void *buffer, int flags);
  void (*release_buffer)(void *buffer);
  intptr_t (*tuple_size)(void *tuple);
  void *(*tuple_item)(void *tuple, intptr_t place);
  void *(*save_thread)(void);
  void (*restore_thread)(void *state);
} lmck_python;

/* lmck_gather or lmck_scatter with the memory of Python objects: `payloads` is a tuple of num_frames tuples of one
 * object a layer, contiguous and, for a gather, writable. Sets each frame's `segments`, which mean nothing
 * afterwards. Called with the GIL, which others have while bytes are moved; the memory is held until it returns. */
LMCK_EXPORT int32_t lmck_move_payloads(const lmck_python *python, void *payloads, const lmck_layout *layout,
                                       lmck_frame *frames, int64_t num_frames, int32_t num_threads, int32_t gather,
                                       lmck_fault *fault);

/* XXH3-64 of the little-endian XXH3-64s of 4 KiB pages; nbytes is a multiple of 4096. */
LMCK_EXPORT uint64_t lmck_checksum(const void *memory, int64_t nbytes);

/* The CUDA library. Planes, segments and slots are addresses that the current device can use (segments may be pinned
 * host memory); the arrays that hold planes, frames and segments are the host's, and free again on return. Copies run
 * in order on `stream`. Slots can't be checked on the host: those out of bounds are skipped, and counted in the uint64
 * at num_bad_slots on the device, unless that is 0. */
LMCK_EXPORT const char *lmck_device_built_for(void);
LMCK_EXPORT const char *lmck_device_error(int32_t error);
LMCK_EXPORT int32_t lmck_device_count(void);
LMCK_EXPORT int32_t lmck_device_gather(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames,
                                       void *stream, uint64_t num_bad_slots, lmck_fault *fault);
LMCK_EXPORT int32_t lmck_device_scatter(const lmck_layout *layout, const lmck_frame *frames, int64_t num_frames,
                                        void *stream, uint64_t num_bad_slots, lmck_fault *fault);

/* What staged copies need beside the launches. Handles are numbers; stream 0 is CUDA's default one. All return a
 * cudaError_t, 0 being good, and act on the calling thread's current device. None waits for the device, but for those
 * said to wait, and lmck_device_free and lmck_host_(un)register, in which CUDA may. */
LMCK_EXPORT int32_t lmck_device_current(int32_t *device);
LMCK_EXPORT int32_t lmck_host_register(uint64_t address, int64_t nbytes); /* pins it, for all devices */
LMCK_EXPORT int32_t lmck_host_unregister(uint64_t address);
LMCK_EXPORT int32_t lmck_device_allocate(int64_t nbytes, uint64_t *address);
LMCK_EXPORT int32_t lmck_device_free(uint64_t address);
LMCK_EXPORT int32_t lmck_stream_create(uint64_t *stream);
LMCK_EXPORT int32_t lmck_stream_destroy(uint64_t stream);
LMCK_EXPORT int32_t lmck_stream_follow(uint64_t stream, uint64_t event); /* what comes next runs after the event */
LMCK_EXPORT int32_t lmck_stream_drain(uint64_t stream);                  /* waits */
LMCK_EXPORT int32_t lmck_event_create(uint64_t *event);
LMCK_EXPORT int32_t lmck_event_destroy(uint64_t event);
LMCK_EXPORT int32_t lmck_event_record(uint64_t event, uint64_t stream);
LMCK_EXPORT int32_t lmck_event_query(uint64_t event, int32_t *done);
LMCK_EXPORT int32_t lmck_event_wait(uint64_t event); /* waits, asleep */
/* Rows of row_nbytes, the pitches apart, between host and device; host memory may be pageable. */
LMCK_EXPORT int32_t lmck_copy_rows(uint64_t to, int64_t to_pitch, uint64_t from, int64_t from_pitch,
                                   int64_t row_nbytes, int64_t num_rows, uint64_t stream);

#ifdef __cplusplus
}
#endif
#endif
