// The control API of the simulated GPU: how tests and tools look into it, let it fail, and queue
// work that stands for kernels. Plain C, no CUDA header needed; `trae_mem.sim.control` wraps it.
//
// The simulator reads the environment variable TRAE_MEM_SIM once, at its first use: `key=value`
// separated by commas, the keys in configuration.h.
//
// Texts are JSON. A function that writes one returns the size that the whole text needs, with the
// terminating zero; when that is more than `size`, call again with a buffer so large.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SIMGPU_API __attribute__((visibility("default")))
#else
#define SIMGPU_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// 0 numeric: memory is real and work has effects; 1 dry: memory is only counted.
SIMGPU_API int simgpu_mode(void);

// Device memory that queued work touches.
typedef struct {
  const void* address;
  size_t bytes;
  int writes;  // 1: written, 0: only read
} simgpu_range;

// Queues work on a stream (cudaStream_t or CUstream; 0: the current device's default stream).
// `run(data)` is called on the stream's thread, in the stream's order, then `destroy(data)`; both
// may be null. Work whose ranges are not mapped and accessible when its turn comes, and work in a
// context that has failed, is destroyed without being run. Returns a cudaError_t; when it is not
// 0, nothing was queued, and `destroy(data)` has been called already.
SIMGPU_API int simgpu_launch(void* stream, const char* name, void (*run)(void*),
                             void (*destroy)(void*), void* data, const simgpu_range* ranges,
                             size_t count);

// Work that takes time but has no effect. With pace=1 the stream is busy for
// max(flops / FLOPS, bytes / BANDWIDTH), never less than a kernel's launch (5 us).
SIMGPU_API int simgpu_work(void* stream, const char* name, double flops, double bytes);

// Fails the context of the stream's device for good, as a kernel's device-side assertion does: for
// work that finds, while it runs, that it cannot be done. `message` goes into the report.
SIMGPU_API void simgpu_abort(void* stream, int code, const char* kind, const char* message);

// {"cuMemMap": {"count": 12, "blocking": 0, "by": {LIBRARY: 12}, "blocking_by": {}}, ...} by API
// function and calling library. `blocking`: how often the call made the host wait for the device.
SIMGPU_API size_t simgpu_calls(char* out, size_t size);
SIMGPU_API void simgpu_reset_calls(void);

// The nth call from now on (1: the next) of `function` fails with `code` (a CUresult or
// cudaError_t; 0: out of memory for what allocates, else CUDA_ERROR_UNKNOWN). `caller`: "" for
// any, else only calls from a library whose file name contains it. `sticky`: the current device's
// context returns the code from then on, until simgpu_clear_faults.
SIMGPU_API void simgpu_fail(const char* function, uint64_t nth, int code, int sticky,
                            const char* caller);
// Forgets the planned faults and heals failed contexts.
SIMGPU_API void simgpu_clear_faults(void);

// From now on: seeded random delays of up to `delay_us` before each copy, kernel and completion of
// an event; `poison`: fresh, unmapped and freed memory is filled with 0xFF (NaN).
SIMGPU_API void simgpu_set_adversary(uint64_t seed, uint64_t delay_us, int poison);
// Bytes a second of copies between host and device that begin from now on; 0: no limit (pace=1).
SIMGPU_API void simgpu_set_link(double bytes_per_second);
// The device's capacity from now on; what is allocated already stays.
SIMGPU_API void simgpu_set_memory(int device, uint64_t bytes);

// Misuse so far: [{"kind": "...", "message": "...", "stack": ["...", ...]}, ...], oldest first.
SIMGPU_API size_t simgpu_reports(char* out, size_t size);
SIMGPU_API void simgpu_clear_reports(void);

// What lives, by the library that made it, libraries that hold nothing left out:
// {LIBRARY: {"handles": 3, "mapped_bytes": ..., "reservations": ..., "allocations": ...,
//            "streams": ..., "events": ..., "pinned_bytes": ...}}
SIMGPU_API size_t simgpu_live(char* out, size_t size);

SIMGPU_API uint64_t simgpu_used_bytes(int device);
SIMGPU_API uint64_t simgpu_peak_bytes(int device);
SIMGPU_API void simgpu_reset_peak(int device);
// pace=1: how long an engine was busy, in modelled time. 0: kernels, 1: copies to the device,
// 2: copies to the host.
SIMGPU_API double simgpu_busy_seconds(int device, int what);

#ifdef __cplusplus
}
#endif
