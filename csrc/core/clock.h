// The one clock of the core: monotonic, the same as Python's time.monotonic_ns().
#pragma once

#include <chrono>
#include <cstdint>

namespace trae_mem {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace trae_mem
