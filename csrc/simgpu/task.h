// One piece of work in a stream: what it does, what memory it touches, how long the model says
// that it takes, and who queued it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "calls.h"
#include "completion.h"
#include "reports.h"

namespace simgpu {

// What kind of memory an address belonged to when work on it was queued.
enum class Place {
  kDevice,    // reserved or allocated device addresses
  kPinned,    // registered host memory, from which the device copies by itself
  kPageable,  // any other host memory
};

struct Range {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Place place = Place::kDevice;
  std::uint64_t registration = 0;  // kPinned: which registration it was

  [[nodiscard]] bool overlaps(std::uintptr_t other, std::size_t size) const {
    return address < other + size && other < address + bytes;
  }
};

// Who queued it. The stack is taken only of work that touches memory.
struct Origin {
  std::string name;  // "cuMemcpyHtoDAsync", or the kernel's name
  const Library* library = nullptr;
  Stack stack;
};

enum class Engine { kNone, kKernels, kToDevice, kToHost };

struct Task {
  enum class Kind {
    kWork,    // runs `run`; skipped in a failed context
    kRecord,  // finishes `point`
    kWait,    // waits for `point`
  };
  Kind kind = Kind::kWork;
  Origin origin;
  std::vector<Range> ranges;
  bool peers = false;           // a copy may touch any device's memory, a kernel only its own
  std::function<void()> run;    // null: no effect
  bool even_if_failed = false;  // run also in a failed context
  bool visible = false;         // `run` shows to the host: it must not happen before its time
  std::shared_ptr<Completion> point;
  Engine engine = Engine::kNone;  // what it keeps busy
  double seconds = 0;             // for how long, where that does not depend on the link
  std::size_t link_bytes = 0;     // what goes over the link
  Time submitted{};
  bool hurried = false;  // no random delay: the host waits for it, and nobody else
};

}  // namespace simgpu
