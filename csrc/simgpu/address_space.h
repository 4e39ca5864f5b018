// The books of device addresses: what is reserved, what physical memory is mapped where, and who
// may touch it. One space for all devices and the host, as with unified addressing. Not locked:
// `memory.cpp` holds the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "calls.h"
#include "codes.h"
#include "physical_memory.h"
#include "task.h"

namespace simgpu {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;

inline std::size_t rounded(std::size_t bytes) {
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

struct Reservation {
  std::size_t bytes;
  const Library* owner;
};

struct Mapping {
  std::size_t bytes;
  std::shared_ptr<Allocation> memory;
  std::uint64_t handle;  // 0: made by cudaMalloc, and freed only by cudaFree
  std::uint64_t access;  // a bit for each device that may touch it
  const Library* owner;
};

struct PhysicalHandle {
  std::shared_ptr<Allocation> memory;
  int references;  // cuMemCreate, cuMemRetainAllocationHandle
  const Library* owner;
};

// Why work may not touch a range.
enum class Verdict { kFine, kNotMapped, kNoAccess };

class AddressSpace {
 public:
  static constexpr std::uint64_t kFirstHandle = 0x1000;
  using Mappings = std::map<std::uintptr_t, Mapping>;

  Code reserve(std::uintptr_t* address, std::size_t bytes, std::size_t alignment);
  Code free(std::uintptr_t address, std::size_t bytes);

  std::uint64_t add_handle(std::shared_ptr<Allocation> memory);
  Code release(std::uint64_t handle);
  Code retain(std::uint64_t* handle, std::uintptr_t address);
  [[nodiscard]] std::shared_ptr<Allocation> physical(std::uint64_t handle) const;
  [[nodiscard]] bool existed(std::uint64_t handle) const;

  Code map(std::uintptr_t address, std::size_t bytes, std::uint64_t handle);
  // kInvalidValue where the range is not made of whole mappings; `*partial` says that it cuts one.
  Code check_unmap(std::uintptr_t address, std::size_t bytes, bool* partial) const;
  void unmap(std::uintptr_t address, std::size_t bytes);
  Code set_access(std::uintptr_t address, std::size_t bytes, int device, bool allowed);

  Code allocate(std::uintptr_t* address, std::shared_ptr<Allocation> memory);
  [[nodiscard]] bool is_allocation(std::uintptr_t address) const;
  [[nodiscard]] bool was_allocation(std::uintptr_t address) const;
  void free_allocation(std::uintptr_t address);

  [[nodiscard]] Verdict check(const Range& range, int device, bool peers) const;
  [[nodiscard]] bool is_device(std::uintptr_t address) const;
  [[nodiscard]] Mappings::const_iterator mapping_at(std::uintptr_t address) const;

  [[nodiscard]] const Mappings& mappings() const { return mappings_; }
  [[nodiscard]] const std::map<std::uintptr_t, Reservation>& reservations() const {
    return reservations_;
  }
  [[nodiscard]] const std::map<std::uint64_t, PhysicalHandle>& handles() const { return handles_; }

 private:
  [[nodiscard]] bool reserved(std::uintptr_t address, std::size_t bytes) const;
  [[nodiscard]] bool any_mapping(std::uintptr_t address, std::size_t bytes) const;
  void forget(Mappings::iterator mapping);

  std::map<std::uintptr_t, Reservation> reservations_;  // those of cudaMalloc included
  Mappings mappings_;
  std::map<std::uint64_t, PhysicalHandle> handles_;
  std::uint64_t last_handle_ = kFirstHandle;
  std::set<std::uintptr_t> freed_;  // former cudaMalloc addresses that were not given out again
};

}  // namespace simgpu
