// Work that is queued on streams: copies, fills, host functions, kernels (streams.h).
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "configuration.h"
#include "device.h"
#include "host_memory.h"
#include "memory.h"
#include "process.h"
#include "reports.h"
#include "streams.h"

namespace simgpu {
namespace {

Origin origin_here(std::string name) {
  return {std::move(name), &current_library(), Stack::capture()};
}

std::string call_name() {
  const Call* const call = Call::current();
  return call == nullptr ? "work" : call->name();
}

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// What the model says that a copy keeps busy, and for how long.
void set_engine(Task& task, Place to, Place from, std::size_t bytes) {
  if (to == Place::kDevice && from == Place::kDevice) {
    task.seconds = 2 * static_cast<double>(bytes) / configuration().bandwidth;
  } else if (to == Place::kDevice) {
    task.engine = Engine::kToDevice;
  } else if (from == Place::kDevice) {
    task.engine = Engine::kToHost;
  }
  if (task.engine != Engine::kNone && configuration().pace) task.link_bytes = bytes;
}

std::size_t extent(const Plane& plane, std::size_t width, std::size_t rows) {
  return plane.pitch * (rows - 1) + width;
}

// What the driver sees already when work is queued: memory that is nobody's.
bool is_memory(const Range& range) {
  const bool there = range.place == Place::kDevice
                         ? is_mapped(range)
                         : is_mapped_in_process(range.address, range.bytes);
  if (!there) {
    char text[80];
    std::snprintf(text, sizeof text, ": [0x%zx, +%zu bytes) is not all mapped.",
                  static_cast<std::size_t>(range.address), range.bytes);
    report(kind::kIllegalAddress, call_name() + text);
  }
  return there;
}

// In dry mode there are no bytes: what comes from the device reads as zeros.
std::function<void()> effect_of_copy(Plane to, Plane from, const Range& target, const Range& source,
                                     std::size_t width, std::size_t rows) {
  const bool dry = configuration().dry;
  if (dry && target.place == Place::kDevice) return nullptr;
  const bool zeros = dry && source.place == Place::kDevice;
  return [=] {
    for (std::size_t row = 0; row < rows; ++row) {
      void* const out = pointer(to.address + row * to.pitch);
      if (zeros) {
        std::memset(out, 0, width);
      } else {
        std::memmove(out, pointer(from.address + row * from.pitch), width);
      }
    }
  };
}

}  // namespace

Code copy_rows(Plane to, Plane from, std::size_t width, std::size_t rows, Handle stream,
               bool blocking) {
  const std::shared_ptr<Stream> queue = find_stream(stream);
  if (queue == nullptr) return Code::kInvalidHandle;
  if (width > 0 && rows > 0) {
    const Range target = range_of(to.address, extent(to, width, rows));
    const Range source = range_of(from.address, extent(from, width, rows));
    if (!is_memory(target) || !is_memory(source)) return Code::kInvalidValue;
    Task task;
    task.origin = origin_here(call_name());
    task.ranges = {target, source};
    task.peers = true;
    task.run = effect_of_copy(to, from, target, source, width, rows);
    task.visible = task.run != nullptr;
    set_engine(task, target.place, source.place, width * rows);
    // The driver cannot copy pageable memory by itself: the host stages it, and waits.
    if (target.place == Place::kPageable || source.place == Place::kPageable) blocking = true;
    queue->push(std::move(task));
  }
  if (!blocking) return Code::kOk;
  Call::note_blocking();
  queue->synchronize();
  return queue->device().failure();
}

Code copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, Handle stream, bool blocking) {
  return copy_rows({to, bytes}, {from, bytes}, bytes, 1, stream, blocking);
}

Code fill(std::uintptr_t to, std::uint32_t pattern, std::size_t pattern_bytes, std::size_t count,
          Handle stream) {
  const std::shared_ptr<Stream> queue = find_stream(stream);
  if (queue == nullptr) return Code::kInvalidHandle;
  const std::size_t bytes = pattern_bytes * count;
  if (bytes == 0) return Code::kOk;
  const Range target = range_of(to, bytes);
  if (target.place == Place::kPageable || !is_memory(target)) return Code::kInvalidValue;
  Task task;
  task.origin = origin_here(call_name());
  task.ranges = {target};
  if (!configuration().dry) {
    task.run = [=] {
      if (pattern_bytes == 1) {
        std::memset(pointer(to), static_cast<int>(pattern), count);
        return;
      }
      for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(pointer(to + i * pattern_bytes), &pattern, pattern_bytes);
      }
    };
  }
  task.visible = task.run != nullptr;
  task.seconds = static_cast<double>(bytes) / configuration().bandwidth;
  queue->push(std::move(task));
  return Code::kOk;
}

Code run_on_host(std::function<void(Code)> function, Handle stream, bool even_if_failed) {
  const std::shared_ptr<Stream> queue = find_stream(stream);
  if (queue == nullptr) return Code::kInvalidHandle;
  Task task;
  task.origin = {call_name(), &current_library(), {}};
  task.run = [function = std::move(function), device = &queue->device()] {
    const InHostFunction guard;
    function(device->failure());
  };
  task.visible = true;
  task.even_if_failed = even_if_failed;
  queue->push(std::move(task));
  return Code::kOk;
}

Code launch_opaque_kernel(const char* name, Handle stream) {
  if (configuration().dry) return work(stream, name, 0, 0);
  report(kind::kNoCpuKernel, demangled(name) + ", launched from " + current_library().name +
                                 ": numeric mode cannot compute it. The operator that launches it "
                                 "needs a CPU implementation in its place.");
  return Code::kNotSupported;
}

Code launch(Handle stream, const std::string& name, std::shared_ptr<void> data, void (*run)(void*),
            std::vector<Range> ranges) {
  const std::shared_ptr<Stream> queue = find_stream(stream);
  if (queue == nullptr) return Code::kInvalidHandle;
  Task task;
  task.origin = origin_here(name);
  task.ranges = std::move(ranges);
  task.run = [data = std::move(data), run] {
    if (run != nullptr) run(data.get());
  };
  task.visible = true;
  queue->push(std::move(task));
  return Code::kOk;
}

Code work(Handle stream, const char* name, double flops, double bytes) {
  const std::shared_ptr<Stream> queue = find_stream(stream);
  if (queue == nullptr) return Code::kInvalidHandle;
  const Configuration& card = configuration();
  Task task;
  task.engine = Engine::kKernels;
  if (card.pace) {
    const double computing = card.flops > 0 ? flops / card.flops : 0;
    const double moving = card.bandwidth > 0 ? bytes / card.bandwidth : 0;
    task.seconds = std::max({computing, moving, kLaunchSeconds});
  }
  task.origin = {name == nullptr ? "kernel" : name, &current_library(), {}};
  queue->push(std::move(task));
  return Code::kOk;
}

}  // namespace simgpu
