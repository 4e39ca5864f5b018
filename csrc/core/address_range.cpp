#include "address_range.h"

#include <utility>

#include "error.h"

namespace trae_mem {

AddressRange::AddressRange(std::shared_ptr<Device> device, std::size_t bytes)
    : device_(std::move(device)),
      bytes_((bytes + kPageBytes - 1) / kPageBytes * kPageBytes),
      begin_(device_->reserve(bytes_)) {}

AddressRange::~AddressRange() {
  try {
    for (const auto& [offset, bytes] : mapped_) device_->unmap(begin_ + offset, bytes);
    device_->free_addresses(begin_, bytes_);
  } catch (const Error&) {
    // A destructor cannot report; addresses that the device refuses to take back stay reserved.
  }
}

void AddressRange::map(std::size_t offset, std::size_t bytes, PageHandle handle) {
  if (offset + bytes > bytes_) throw InvalidArgument("map: outside of the address range");
  device_->map(begin_ + offset, bytes, handle);
  mapped_[offset] = bytes;
}

void AddressRange::unmap(std::size_t offset) {
  const auto mapping = mapped_.find(offset);
  if (mapping == mapped_.end()) throw InvalidArgument("unmap: nothing is mapped there");
  device_->unmap(begin_ + offset, mapping->second);
  mapped_.erase(mapping);
}

void AddressRange::check_invariants() const {
  std::size_t end = 0;
  for (const auto& [offset, bytes] : mapped_) {
    if (offset < end) throw Error("two mappings of a range overlap");
    end = offset + bytes;
  }
  if (end > bytes_) throw Error("a mapping reaches beyond its range");
}

}  // namespace trae_mem
