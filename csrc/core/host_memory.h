// The physical memory of a HostDevice: handles, each a contiguous range of one memfd.
//
// Ownership. HostMemory owns the memfd, its base mapping and the table of handles. A handle and
// each of its mappings share a Pages; its range is free again once the handle is released and the
// last mapping is gone. Addresses belong to the device: it asks for pages at addresses that it has
// reserved, and tells when it has taken them away.
//
// Locking. None of its own: the device's mutex guards every call, because a mapping and its count
// must change together. Only the base mapping is used without it: its place never changes, and
// streams write to the bytes of mapped pages, which stay until they are unmapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>

#include "device.h"

namespace trae_mem {

class HostMemory {
 public:
  struct Pages {         // one handle's physical memory
    std::size_t offset;  // in the memfd
    std::size_t bytes;
    std::size_t mappings;  // how often it is mapped
    bool released;         // the handle is gone; the last unmap frees the memory
  };

  // `bytes`: capacity, rounded down to whole pages; 0: the machine's RAM. Throws InvalidArgument
  // for less than a page, DeviceError when the system has no descriptor or no addresses.
  explicit HostMemory(std::size_t bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

  // `bytes`: whole pages. Throws OutOfMemory when no free range is long enough.
  PageHandle create(std::size_t bytes);
  // Throws InvalidArgument for an unknown handle.
  void release(PageHandle handle);
  [[nodiscard]] std::shared_ptr<Pages> find(PageHandle handle) const;  // null: not a handle

  // Puts the pages at `address`, in place of what is mapped there, and counts the mapping.
  void map(Address address, Pages& pages);
  // One mapping of the pages is gone; the caller has replaced it.
  void unmapped(Pages& pages);
  // The pages' bytes in the base mapping, for host code that writes them.
  [[nodiscard]] std::span<std::byte> base_bytes(const Pages& pages) const;

  // The counters add up. `mapped`: how often the device has mapped which pages.
  void check_invariants(std::map<const Pages*, std::size_t> mapped) const;

 private:
  std::size_t take_range(std::size_t bytes);
  void give_back_range(std::size_t offset, std::size_t bytes);
  void free_if_unused(const Pages& pages);

  const std::size_t capacity_;
  int memory_fd_ = -1;                              // the memfd behind all pages
  std::byte* base_ = nullptr;                       // the base mapping of capacity_ bytes
  std::size_t end_ = 0;                             // of the memfd
  std::size_t used_ = 0;                            // bytes of living pages
  std::map<std::size_t, std::size_t> free_ranges_;  // offset -> bytes, below end_, never adjacent
  std::unordered_map<std::uint64_t, std::shared_ptr<Pages>> handles_;
  std::uint64_t next_handle_ = 1;
};

}  // namespace trae_mem
