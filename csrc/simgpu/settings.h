// What the control API may change while the simulation runs; begins as the configuration says.
#pragma once

#include <atomic>
#include <cstdint>

namespace simgpu {

struct Settings {
  Settings();
  std::atomic<std::uint64_t> seed;
  std::atomic<std::uint64_t> delay_us;
  std::atomic<bool> poison;
  std::atomic<double> link;  // bytes/s, 0: no limit
};

Settings& settings();

}  // namespace simgpu
