// Host memory that a GPU copies from at full speed, of exactly the size that is asked for.
//
// Ours is mapped and then registered with the driver (cuMemHostRegister); torch's pinned allocator
// would round up to powers of two. Where the driver refuses (little lockable memory, a container,
// an emulation), the memory stays as it is and works all the same: the device copies from it
// through its staging ring. `note` tells why, for whoever shows a warning.
//
// Ownership. A buffer may outlive its device, since Python's tensors view it; it keeps what it
// needs to unregister itself. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda_context.h"
#include "device.h"

namespace trae_mem {

class PinnedMemory : public std::enable_shared_from_this<PinnedMemory> {
 public:
  explicit PinnedMemory(std::shared_ptr<const CudaContext> context);

  // Throws OutOfMemory when the system has no room. `must_pin`: throws DeviceError rather than give
  // memory that is not pinned.
  std::unique_ptr<HostBuffer> allocate(std::size_t bytes, bool must_pin = false);
  // True if all of [memory, memory + bytes) lies in one pinned buffer.
  [[nodiscard]] bool covers(const void* memory, std::size_t bytes) const;
  // Why some buffer could not be pinned; empty while all are.
  [[nodiscard]] std::string note() const;

 private:
  class Buffer;

  void enlist(std::byte* memory, std::size_t bytes);
  void strike_off(std::byte* memory) noexcept;
  [[nodiscard]] std::string reason(std::size_t bytes, cuda::Result result) const;

  const std::shared_ptr<const CudaContext> context_;
  mutable std::mutex mutex_;                      // guards all below
  std::map<std::uintptr_t, std::size_t> pinned_;  // address -> bytes
  std::string note_;
};

}  // namespace trae_mem
