#include "address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "configuration.h"
#include "settings.h"

namespace simgpu {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Addresses without memory behind them; 0 if the system has none.
std::uintptr_t system_reserve(std::size_t bytes, std::size_t alignment) {
  void* const made = mmap(nullptr, bytes + alignment, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<std::uintptr_t>(made);
  const std::uintptr_t aligned = (begin + alignment - 1) / alignment * alignment;
  if (aligned > begin) munmap(made, aligned - begin);
  const std::size_t behind = begin + alignment - aligned;
  if (behind > 0) munmap(pointer(aligned + bytes), behind);
  return aligned;
}

void system_unmap(std::uintptr_t address, std::size_t bytes) {
  if (configuration().dry) return;
  mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
}

bool system_protect(std::uintptr_t address, std::size_t bytes, bool accessible) {
  if (configuration().dry) return true;
  return mprotect(pointer(address), bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE) == 0;
}

bool whole_pages(std::uintptr_t address, std::size_t bytes) {
  return bytes > 0 && address % kGranularity == 0 && bytes % kGranularity == 0;
}

}  // namespace

Code AddressSpace::reserve(std::uintptr_t* address, std::size_t bytes, std::size_t alignment) {
  if (bytes == 0 || bytes % kGranularity != 0) return Code::kInvalidValue;
  if ((alignment & (alignment - 1)) != 0) return Code::kInvalidValue;
  const std::uintptr_t made = system_reserve(bytes, std::max(alignment, kGranularity));
  if (made == 0) return Code::kOutOfMemory;
  reservations_[made] = {bytes, &current_library()};
  *address = made;
  return Code::kOk;
}

Code AddressSpace::free(std::uintptr_t address, std::size_t bytes) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.bytes != bytes) return Code::kInvalidValue;
  if (any_mapping(address, bytes)) return Code::kInvalidValue;
  munmap(pointer(address), bytes);
  reservations_.erase(found);
  return Code::kOk;
}

bool AddressSpace::reserved(std::uintptr_t address, std::size_t bytes) const {
  auto found = reservations_.upper_bound(address);
  if (found == reservations_.begin()) return false;
  --found;
  return address + bytes <= found->first + found->second.bytes;
}

bool AddressSpace::is_device(std::uintptr_t address) const { return reserved(address, 1); }

AddressSpace::Mappings::const_iterator AddressSpace::mapping_at(std::uintptr_t address) const {
  auto found = mappings_.upper_bound(address);
  if (found == mappings_.begin()) return mappings_.end();
  --found;
  return address < found->first + found->second.bytes ? found : mappings_.end();
}

bool AddressSpace::any_mapping(std::uintptr_t address, std::size_t bytes) const {
  if (mapping_at(address) != mappings_.end()) return true;
  const auto next = mappings_.lower_bound(address);
  return next != mappings_.end() && next->first < address + bytes;
}

std::uint64_t AddressSpace::add_handle(std::shared_ptr<Allocation> memory) {
  handles_[++last_handle_] = {std::move(memory), 1, &current_library()};
  return last_handle_;
}

Code AddressSpace::release(std::uint64_t handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return Code::kInvalidValue;
  if (--found->second.references == 0) handles_.erase(found);
  return Code::kOk;
}

Code AddressSpace::retain(std::uint64_t* handle, std::uintptr_t address) {
  const auto mapping = mapping_at(address);
  if (mapping == mappings_.end() || mapping->second.handle == 0) return Code::kInvalidValue;
  const std::uint64_t id = mapping->second.handle;
  const auto found = handles_.find(id);
  if (found == handles_.end()) {
    handles_[id] = {mapping->second.memory, 1, &current_library()};
  } else {
    ++found->second.references;
  }
  *handle = id;
  return Code::kOk;
}

std::shared_ptr<Allocation> AddressSpace::physical(std::uint64_t handle) const {
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second.memory;
}

bool AddressSpace::existed(std::uint64_t handle) const {
  return handle > kFirstHandle && handle <= last_handle_;
}

Code AddressSpace::map(std::uintptr_t address, std::size_t bytes, std::uint64_t handle) {
  const std::shared_ptr<Allocation> memory = physical(handle);
  if (memory == nullptr || !whole_pages(address, bytes)) return Code::kInvalidValue;
  if (bytes > memory->bytes() || !reserved(address, bytes)) return Code::kInvalidValue;
  if (any_mapping(address, bytes)) return Code::kInvalidValue;
  if (!memory->map_at(address, bytes)) return Code::kOutOfMemory;
  ++memory->mappings;
  mappings_[address] = {bytes, memory, handle, 0, &current_library()};
  return Code::kOk;
}

Code AddressSpace::check_unmap(std::uintptr_t address, std::size_t bytes, bool* partial) const {
  *partial = false;
  if (bytes == 0) return Code::kInvalidValue;
  std::uintptr_t at = address;
  const std::uintptr_t end = address + bytes;
  while (at < end) {
    const auto mapping = mapping_at(at);
    if (mapping == mappings_.end() || mapping->second.handle == 0) return Code::kInvalidValue;
    *partial = mapping->first != at || mapping->first + mapping->second.bytes > end;
    if (*partial) return Code::kInvalidValue;
    at = mapping->first + mapping->second.bytes;
  }
  return Code::kOk;
}

void AddressSpace::forget(Mappings::iterator mapping) {
  Allocation& memory = *mapping->second.memory;
  // Memory that no handle keeps is gone anyway.
  const bool kept = mapping->second.memory.use_count() > 1;
  if (--memory.mappings == 0 && kept && settings().poison) memory.fill_with_nan();
  mappings_.erase(mapping);
}

void AddressSpace::unmap(std::uintptr_t address, std::size_t bytes) {
  for (auto mapping = mappings_.lower_bound(address);
       mapping != mappings_.end() && mapping->first < address + bytes;) {
    const auto next = std::next(mapping);
    forget(mapping);
    mapping = next;
  }
  system_unmap(address, bytes);
}

Code AddressSpace::set_access(std::uintptr_t address, std::size_t bytes, int device, bool allowed) {
  if (!whole_pages(address, bytes)) return Code::kInvalidValue;
  for (std::uintptr_t at = address; at < address + bytes;) {
    const auto mapping = mapping_at(at);
    if (mapping == mappings_.end() || mapping->second.handle == 0) return Code::kInvalidValue;
    at = mapping->first + mapping->second.bytes;
    if (at > address + bytes) return Code::kInvalidValue;
  }
  const std::uint64_t bit = std::uint64_t{1} << device;
  for (auto mapping = mappings_.lower_bound(address);
       mapping != mappings_.end() && mapping->first < address + bytes; ++mapping) {
    std::uint64_t& access = mapping->second.access;
    access = allowed ? access | bit : access & ~bit;
    if (!system_protect(mapping->first, mapping->second.bytes, access != 0)) {
      return Code::kOutOfMemory;
    }
  }
  return Code::kOk;
}

Code AddressSpace::allocate(std::uintptr_t* address, std::shared_ptr<Allocation> memory) {
  const std::size_t bytes = memory->bytes();
  const std::uintptr_t made = system_reserve(bytes, kGranularity);
  if (made == 0) return Code::kOutOfMemory;
  if (!memory->map_at(made, bytes) || !system_protect(made, bytes, true)) {
    munmap(pointer(made), bytes);
    return Code::kOutOfMemory;
  }
  ++memory->mappings;
  const std::uint64_t everyone = ~std::uint64_t{0};
  const std::uint64_t own = std::uint64_t{1} << memory->device();
  reservations_[made] = {bytes, nullptr};
  mappings_[made] = {bytes, std::move(memory), 0, configuration().devices > 1 ? everyone : own,
                     &current_library()};
  freed_.erase(made);
  *address = made;
  return Code::kOk;
}

bool AddressSpace::is_allocation(std::uintptr_t address) const {
  const auto found = mappings_.find(address);
  return found != mappings_.end() && found->second.handle == 0;
}

bool AddressSpace::was_allocation(std::uintptr_t address) const { return freed_.contains(address); }

void AddressSpace::free_allocation(std::uintptr_t address) {
  const auto found = mappings_.find(address);
  const std::size_t bytes = found->second.bytes;
  forget(found);
  munmap(pointer(address), bytes);
  reservations_.erase(address);
  freed_.insert(address);
}

Verdict AddressSpace::check(const Range& range, int device, bool peers) const {
  const std::uintptr_t end = range.address + range.bytes;
  for (std::uintptr_t at = range.address; at < end;) {
    const auto mapping = mapping_at(at);
    if (mapping == mappings_.end()) return Verdict::kNotMapped;
    const std::uint64_t access = mapping->second.access;
    const std::uint64_t wanted = peers ? ~std::uint64_t{0} : std::uint64_t{1} << device;
    if ((access & wanted) == 0) return Verdict::kNoAccess;
    at = mapping->first + mapping->second.bytes;
  }
  return Verdict::kFine;
}

}  // namespace simgpu
