// Device and registered host memory as the APIs offer it, behind one lock, with the sanitizer's
// checks: nothing is unmapped, freed or unregistered under work that is queued without a report,
// and nothing is taken away from work that is running.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codes.h"
#include "task.h"

namespace simgpu {

class Device;

// --- virtual memory management ------------------------------------------------------------------
SIMGPU_API Code reserve_addresses(std::uintptr_t* address, std::size_t bytes,
                                  std::size_t alignment);
SIMGPU_API Code free_addresses(std::uintptr_t address, std::size_t bytes);
SIMGPU_API Code create_physical(std::uint64_t* handle, std::size_t bytes, int device);
SIMGPU_API Code release_physical(std::uint64_t handle);
SIMGPU_API Code retain_physical(std::uint64_t* handle, std::uintptr_t address);
SIMGPU_API Code device_of_physical(int* device, std::uint64_t handle);
SIMGPU_API Code map_physical(std::uintptr_t address, std::size_t bytes, std::size_t offset,
                             std::uint64_t handle);
SIMGPU_API Code unmap(std::uintptr_t address, std::size_t bytes);
SIMGPU_API Code set_access(std::uintptr_t address, std::size_t bytes, int device, bool allowed);
SIMGPU_API Code has_access(bool* allowed, std::uintptr_t address, int device);

// --- plain allocations, on the current device ---------------------------------------------------
SIMGPU_API Code allocate(std::uintptr_t* address, std::size_t bytes);
SIMGPU_API Code free_allocation(std::uintptr_t address);  // waits for the device
SIMGPU_API Code memory_info(std::size_t* free, std::size_t* total);

// --- host memory --------------------------------------------------------------------------------
SIMGPU_API Code allocate_host(std::uintptr_t* address, std::size_t bytes, unsigned flags);
SIMGPU_API Code free_host(std::uintptr_t address);
SIMGPU_API Code register_host(std::uintptr_t address, std::size_t bytes, unsigned flags);
SIMGPU_API Code unregister_host(std::uintptr_t address);

// --- what an address is -------------------------------------------------------------------------
struct AddressFacts {
  Place place = Place::kPageable;
  bool mapped = false;  // kDevice: has memory behind it
  int device = 0;       // kDevice: whose memory
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  unsigned flags = 0;        // kPinned: as registered
  std::uint64_t buffer = 0;  // a number of its own
};
SIMGPU_API AddressFacts facts_of(std::uintptr_t address);

// A range as work is queued on it.
Range range_of(std::uintptr_t address, std::size_t bytes);
// Whether all of a device range has memory behind it now.
bool is_mapped(const Range& range);

// Around running a task: false, after a report and failing the device's context, when one of its
// ranges cannot be touched.
bool begin_use(const Task& task, Device& device);
void end_use(const Task& task);
// For the end of the process; gives up on work that takes longer than seconds.
void wait_until_nothing_runs();

}  // namespace simgpu
