// Streams, events and ordered work as the APIs offer them. Handles are the APIs' own values
// (CUstream, cudaEvent_t) as numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codes.h"
#include "objects.h"

namespace simgpu {

inline constexpr int kLowestPriority = 0;
inline constexpr int kHighestPriority = -5;
inline constexpr double kLaunchSeconds = 5e-6;  // what a kernel takes at least

SIMGPU_API Code create_stream(Handle* stream, int priority, unsigned flags);
SIMGPU_API Code destroy_stream(Handle stream);  // what is queued is still done
SIMGPU_API Code synchronize_stream(Handle stream);
SIMGPU_API Code query_stream(Handle stream);
SIMGPU_API Code wait_event(Handle stream, Handle event);  // for the last record at this call

struct StreamFacts {
  int device;
  int priority;
  unsigned flags;
  std::uint64_t id;
};
SIMGPU_API Code stream_facts(StreamFacts* facts, Handle stream);

SIMGPU_API Code create_event(Handle* event, bool timed);
SIMGPU_API Code destroy_event(Handle event);
SIMGPU_API Code record_event(Handle event, Handle stream);
SIMGPU_API Code query_event(Handle event);
SIMGPU_API Code synchronize_event(Handle event);
SIMGPU_API Code elapsed_ms(float* milliseconds, Handle from, Handle to);

SIMGPU_API Code synchronize_current_device();
void synchronize_device(Device& device);

// Copies between any two places. Work with pageable memory blocks the host, as on a GPU; so does
// `blocking`.
SIMGPU_API Code copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, Handle stream,
                     bool blocking);
struct Plane {
  std::uintptr_t address;
  std::size_t pitch;  // bytes from one row to the next
};
SIMGPU_API Code copy_rows(Plane to, Plane from, std::size_t width, std::size_t rows, Handle stream,
                          bool blocking);
// Fills with a pattern of 1, 2 or 4 bytes.
SIMGPU_API Code fill(std::uintptr_t to, std::uint32_t pattern, std::size_t pattern_bytes,
                     std::size_t count, Handle stream);
// `even_if_failed`: a callback, which is called in a failed context too, with the code.
SIMGPU_API Code run_on_host(std::function<void(Code)> function, Handle stream, bool even_if_failed);
// A kernel by name that nobody computes: time in dry mode, a refusal and a report in numeric mode.
SIMGPU_API Code launch_opaque_kernel(const char* name, Handle stream);
Code launch(Handle stream, const std::string& name, std::shared_ptr<void> data, void (*run)(void*),
            std::vector<Range> ranges);
Code work(Handle stream, const char* name, double flops, double bytes);

}  // namespace simgpu
