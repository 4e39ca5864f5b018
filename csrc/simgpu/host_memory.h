// The books of host memory from which a device copies by itself: registered by the application, or
// allocated by the driver. Not locked: `memory.cpp` holds the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

#include "calls.h"
#include "codes.h"
#include "task.h"

namespace simgpu {

struct Registration {
  std::size_t bytes;
  std::uint64_t id;  // never used twice: memory registered again is another registration
  bool allocated;    // by the driver, which unmaps it
  unsigned flags;
  const Library* owner;
};

class HostMemory {
 public:
  Code add(std::uintptr_t address, std::size_t bytes, unsigned flags, bool allocated);
  // Null if no registration begins there.
  [[nodiscard]] const Registration* beginning_at(std::uintptr_t address) const;
  [[nodiscard]] bool was_allocated(std::uintptr_t address) const;
  void remove(std::uintptr_t address);

  // The registration that covers the whole range; null if none does.
  [[nodiscard]] const Registration* covering(std::uintptr_t address, std::size_t bytes) const;
  [[nodiscard]] std::uintptr_t base_of(std::uintptr_t address) const;  // of a covered address

  [[nodiscard]] const std::map<std::uintptr_t, Registration>& registrations() const {
    return registrations_;
  }

 private:
  std::map<std::uintptr_t, Registration> registrations_;
  std::uint64_t last_id_ = 0;
  std::set<std::uintptr_t> freed_;  // former driver allocations
};

// Whether the process has memory at all of these addresses.
bool is_mapped_in_process(std::uintptr_t address, std::size_t bytes);

}  // namespace simgpu
