// A range of device addresses and what is mapped in it, given back with its owner.
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "device.h"

namespace trae_mem {

// Owns the reservation and the mappings, not the physical pages: those must be released after
// the range is gone, or stay valid without it. Not thread-safe.
class AddressRange {
 public:
  // Rounds `bytes` up to whole pages. Throws what the device throws.
  AddressRange(std::shared_ptr<Device> device, std::size_t bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  [[nodiscard]] Address begin() const noexcept { return begin_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  void map(std::size_t offset, std::size_t bytes, PageHandle handle);
  void unmap(std::size_t offset);  // the mapping that begins there
  void check_invariants() const;

 private:
  std::shared_ptr<Device> device_;
  std::size_t bytes_;
  Address begin_;
  std::map<std::size_t, std::size_t> mapped_;  // offset -> bytes
};

}  // namespace trae_mem
