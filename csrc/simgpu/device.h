// One simulated device: its memory, its default stream, its ends of the link, and whether its
// context has failed.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "codes.h"
#include "link.h"
#include "physical_memory.h"
#include "stream.h"

namespace simgpu {

class Device {
 public:
  Device(int ordinal, std::uint64_t memory);

  [[nodiscard]] int ordinal() const { return ordinal_; }
  [[nodiscard]] PhysicalMemory& memory() { return memory_; }
  [[nodiscard]] Stream& default_stream() { return *default_stream_; }
  [[nodiscard]] std::shared_ptr<Stream> share_default_stream() { return default_stream_; }
  [[nodiscard]] Link& to_device() { return to_device_; }
  [[nodiscard]] Link& to_host() { return to_host_; }

  // A failed context stays so: every call that needs it returns the code, work is not run.
  void fail(Code code) { failure_ = code; }
  [[nodiscard]] Code failure() const { return failure_; }

  void add_kernel_seconds(double seconds);
  [[nodiscard]] double kernel_seconds() const;

  std::atomic<int> retained{0};  // the primary context is active while this is not 0
  std::atomic<bool> retained_by_runtime{false};

 private:
  const int ordinal_;
  PhysicalMemory memory_;
  Link to_device_;
  Link to_host_;
  std::atomic<Code> failure_{Code::kOk};
  mutable std::mutex mutex_;
  double kernel_seconds_ = 0;
  std::shared_ptr<Stream> default_stream_;
};

// Devices live as long as the process.
Device& device(int ordinal);
std::vector<Device*> all_devices();

}  // namespace simgpu
