#include "host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>

namespace simgpu {

Code HostMemory::add(std::uintptr_t address, std::size_t bytes, unsigned flags, bool allocated) {
  const auto next = registrations_.lower_bound(address);
  if (next != registrations_.end() && next->first < address + bytes) {
    return Code::kHostAlreadyRegistered;
  }
  if (next != registrations_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > address) return Code::kHostAlreadyRegistered;
  }
  registrations_[address] = {bytes, ++last_id_, allocated, flags, &current_library()};
  freed_.erase(address);
  return Code::kOk;
}

const Registration* HostMemory::beginning_at(std::uintptr_t address) const {
  const auto found = registrations_.find(address);
  return found == registrations_.end() ? nullptr : &found->second;
}

bool HostMemory::was_allocated(std::uintptr_t address) const { return freed_.contains(address); }

void HostMemory::remove(std::uintptr_t address) {
  const auto found = registrations_.find(address);
  if (found->second.allocated) freed_.insert(address);
  registrations_.erase(found);
}

const Registration* HostMemory::covering(std::uintptr_t address, std::size_t bytes) const {
  auto found = registrations_.upper_bound(address);
  if (found == registrations_.begin()) return nullptr;
  --found;
  return address + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

std::uintptr_t HostMemory::base_of(std::uintptr_t address) const {
  return std::prev(registrations_.upper_bound(address))->first;
}

bool is_mapped_in_process(std::uintptr_t address, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = address / page * page;
  // Linux does nothing for MS_ASYNC but look whether every page belongs to a mapping.
  return msync(reinterpret_cast<void*>(begin), address + bytes - begin, MS_ASYNC) == 0 ||
         errno != ENOMEM;
}

}  // namespace simgpu
