#include "device.h"

#include <cstdlib>
#include <deque>

#include "configuration.h"
#include "process.h"

namespace simgpu {
namespace {

// Stream ids seed the random delays, so the default streams' must not depend on what was made
// before them.
constexpr std::uint64_t kDefaultStreams = std::uint64_t{1} << 40;

struct Devices {
  Devices() {
    const Configuration& made = configuration();
    const int count = visible_devices(made, std::getenv("CUDA_VISIBLE_DEVICES"));
    for (int i = 0; i < count; ++i) list.emplace_back(i, made.memory);
  }
  std::deque<Device> list;
};

Devices& devices() {
  static Devices& made = immortal<Devices>();
  return made;
}

}  // namespace

Device::Device(int ordinal, std::uint64_t memory)
    : ordinal_(ordinal),
      memory_(ordinal, memory),
      default_stream_(std::make_shared<Stream>(
          *this, kDefaultStreams + static_cast<unsigned>(ordinal), 0, 0, current_library())) {}

void Device::add_kernel_seconds(double seconds) {
  const std::lock_guard lock(mutex_);
  kernel_seconds_ += seconds;
}

double Device::kernel_seconds() const {
  const std::lock_guard lock(mutex_);
  return kernel_seconds_;
}

Device& device(int ordinal) { return devices().list.at(static_cast<std::size_t>(ordinal)); }

std::vector<Device*> all_devices() {
  std::vector<Device*> all;
  for (Device& each : devices().list) all.push_back(&each);
  return all;
}

}  // namespace simgpu
