#include "cuda_memory.h"

#include <iterator>
#include <string>
#include <utility>

#include "error.h"

namespace trae_mem {
namespace {

void require_whole_pages(const char* what, Address address, std::size_t bytes) {
  if (bytes == 0 || bytes % kPageBytes != 0 || address % kPageBytes != 0) {
    throw InvalidArgument(std::string(what) + ": " + std::to_string(bytes) +
                          " bytes are not whole pages of 2 MiB");
  }
}

}  // namespace

CudaMemory::CudaMemory(std::shared_ptr<const CudaContext> context, std::size_t limit_bytes)
    : context_(std::move(context)),
      driver_(context_->driver()),
      capacity_(limit_bytes / kPageBytes * kPageBytes) {
  if (limit_bytes == 0) {
    const CudaContext::Guard guard(*context_);
    std::size_t free = 0;
    context_->check(driver_.cuMemGetInfo(&free, &capacity_), "create", "cuMemGetInfo");
  } else if (capacity_ == 0) {
    throw InvalidArgument("GPU: the limit of its memory must be at least 2 MiB");
  }
}

CudaMemory::~CudaMemory() {
  const CudaContext::Guard guard(*context_, std::nothrow);
  if (!guard.entered()) return;  // a forked child, or the driver has ended
  for (const auto& [address, mapping] : mappings_) driver_.cuMemUnmap(address, mapping.bytes);
  for (const auto& [address, reservation] : reservations_) {
    driver_.cuMemAddressFree(address, reservation.bytes);
  }
  for (const auto& [id, pages] : handles_) driver_.cuMemRelease(pages->allocation);
}

Address CudaMemory::reserve(std::size_t bytes) {
  require_whole_pages("reserve", 0, bytes);
  const CudaContext::Guard guard(*context_);
  cuda::DevicePointer address = 0;
  const std::lock_guard lock(mutex_);
  context_->check(driver_.cuMemAddressReserve(&address, bytes, kPageBytes, 0, 0), "reserve",
                  "cuMemAddressReserve");
  reservations_[static_cast<Address>(address)] = {bytes};
  return static_cast<Address>(address);
}

void CudaMemory::free_addresses(Address address, std::size_t bytes) {
  const CudaContext::Guard guard(*context_);
  const std::lock_guard lock(mutex_);
  const auto reservation = reservations_.find(address);
  if (reservation == reservations_.end() || reservation->second.bytes != bytes) {
    throw InvalidArgument("free_addresses: not a reservation");
  }
  if (reservation->second.mapped_bytes != 0) {
    throw InvalidArgument("free_addresses: pages are still mapped there");
  }
  context_->check(CudaDriver::insist([&] { return driver_.cuMemAddressFree(address, bytes); }),
                  "free_addresses", "cuMemAddressFree");
  reservations_.erase(reservation);
}

PageHandle CudaMemory::create(std::size_t bytes) {
  require_whole_pages("create", 0, bytes);
  const CudaContext::Guard guard(*context_);
  const std::lock_guard lock(mutex_);
  if (bytes > capacity_ || used_bytes_ > capacity_ - bytes) {
    throw OutOfMemory("create: no room for " + format_bytes(bytes) + " on GPU " +
                      std::to_string(context_->index()) + ": " + format_bytes(used_bytes_) +
                      " of " + format_bytes(capacity_) + " in use");
  }
  const cuda::AllocationProperties properties{.location = {.id = context_->number()}};
  auto pages = std::make_shared<Pages>(Pages{0, bytes});
  context_->check(driver_.cuMemCreate(&pages->allocation, bytes, &properties, 0), "create",
                  "cuMemCreate");
  used_bytes_ += bytes;
  const std::uint64_t id = next_handle_++;
  handles_[id] = std::move(pages);
  return PageHandle{id};
}

void CudaMemory::release(PageHandle handle) {
  const CudaContext::Guard guard(*context_);
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  if (found == handles_.end()) throw InvalidArgument("release: not a page handle");
  // The driver keeps the memory until it is no longer mapped, as we say of our handles.
  context_->check(
      CudaDriver::insist([&] { return driver_.cuMemRelease(found->second->allocation); }),
      "release", "cuMemRelease");
  found->second->released = true;
  free_if_unused(*found->second);
  handles_.erase(found);
}

CudaMemory::Reservations::const_iterator CudaMemory::reservation_of(Address address,
                                                                    std::size_t bytes) const {
  const auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return reservations_.end();
  const auto reservation = std::prev(next);
  const std::size_t offset = address - reservation->first;
  const std::size_t size = reservation->second.bytes;
  return offset <= size && bytes <= size - offset ? reservation : reservations_.end();
}

void CudaMemory::map(Address address, std::size_t bytes, PageHandle handle) {
  require_whole_pages("map", address, bytes);
  const CudaContext::Guard guard(*context_);
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  if (found == handles_.end()) throw InvalidArgument("map: not a page handle");
  const std::shared_ptr<Pages>& pages = found->second;
  if (pages->bytes != bytes) throw InvalidArgument("map: not the whole handle");
  const auto reservation = reservation_of(address, bytes);
  if (reservation == reservations_.end()) {
    throw InvalidArgument("map: the addresses are not reserved");
  }
  const auto next = mappings_.lower_bound(address);
  const bool overlaps_next = next != mappings_.end() && next->first < address + bytes;
  const bool overlaps_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (overlaps_next || overlaps_previous) throw InvalidArgument("map: already mapped there");
  context_->check(driver_.cuMemMap(address, bytes, 0, pages->allocation, 0), "map", "cuMemMap");
  const cuda::AccessDescription access{.location = {.id = context_->number()}};
  const cuda::Result result = driver_.cuMemSetAccess(address, bytes, &access, 1);
  if (result != cuda::kSuccess) {
    CudaDriver::insist([&] { return driver_.cuMemUnmap(address, bytes); });
    context_->check(result, "map", "cuMemSetAccess");
  }
  mappings_[address] = {bytes, pages};
  ++pages->mappings;
  reservations_[reservation->first].mapped_bytes += bytes;
}

void CudaMemory::unmap(Address address, std::size_t bytes) {
  require_whole_pages("unmap", address, bytes);
  const CudaContext::Guard guard(*context_);
  const std::lock_guard lock(mutex_);
  Address position = address;
  const auto first = mappings_.find(address);
  for (auto next = first; next != mappings_.end() && position < address + bytes; ++next) {
    if (next->first != position) break;
    position += next->second.bytes;
  }
  if (first == mappings_.end() || position != address + bytes) {
    throw InvalidArgument("unmap: only whole mappings can be unmapped");
  }
  for (auto mapping = first; mapping != mappings_.end() && mapping->first < address + bytes;) {
    context_->check(CudaDriver::insist(
                        [&] { return driver_.cuMemUnmap(mapping->first, mapping->second.bytes); }),
                    "unmap", "cuMemUnmap");
    unmapped(mapping++);
  }
}

void CudaMemory::unmapped(std::map<Address, Mapping>::iterator mapping) {
  const auto reservation = reservation_of(mapping->first, mapping->second.bytes);
  reservations_[reservation->first].mapped_bytes -= mapping->second.bytes;
  --mapping->second.pages->mappings;
  free_if_unused(*mapping->second.pages);
  mappings_.erase(mapping);
}

void CudaMemory::free_if_unused(const Pages& pages) {
  if (pages.released && pages.mappings == 0) used_bytes_ -= pages.bytes;
}

void CudaMemory::require_mapped(Address address, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto reservation = reservation_of(address, bytes);
  // A window is mapped as a whole, however many pages it has: one look is enough.
  if (reservation != reservations_.end() &&
      reservation->second.mapped_bytes == reservation->second.bytes) {
    return;
  }
  while (bytes > 0) {
    auto mapping = mappings_.upper_bound(address);
    if (mapping == mappings_.begin() ||
        std::prev(mapping)->first + std::prev(mapping)->second.bytes <= address) {
      throw InvalidArgument("the range is not mapped: " + format_bytes(bytes) + " missing");
    }
    --mapping;
    const std::size_t covered = std::min(bytes, mapping->second.bytes - (address - mapping->first));
    address += covered;
    bytes -= covered;
  }
}

std::size_t CudaMemory::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

void CudaMemory::check_invariants() const {
  const std::lock_guard lock(mutex_);
  std::map<const Pages*, std::size_t> mapped;
  std::map<Address, std::size_t> mapped_bytes;
  for (const auto& [address, mapping] : mappings_) {
    const auto reservation = reservation_of(address, mapping.bytes);
    if (reservation == reservations_.end()) throw Error("a mapping lies outside reservations");
    mapped_bytes[reservation->first] += mapping.bytes;
    ++mapped[mapping.pages.get()];
  }
  for (const auto& [address, reservation] : reservations_) {
    if (mapped_bytes[address] != reservation.mapped_bytes) {
      throw Error("a reservation's count of mapped bytes is wrong");
    }
  }
  for (const auto& [id, pages] : handles_) mapped.try_emplace(pages.get(), 0);
  std::size_t living = 0;
  for (const auto& [pages, count] : mapped) {
    if (pages->mappings != count) throw Error("a page's count of mappings is wrong");
    living += pages->bytes;
  }
  if (living != used_bytes_) throw Error("the count of used bytes is wrong");
}

}  // namespace trae_mem
