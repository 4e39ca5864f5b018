#include "host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <string>
#include <utility>

#include "error.h"

namespace trae_mem {
namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

std::size_t machine_memory() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
}

}  // namespace

HostMemory::HostMemory(std::size_t bytes)
    : capacity_((bytes != 0 ? bytes : machine_memory()) / kPageBytes * kPageBytes) {
  if (capacity_ == 0) throw InvalidArgument("host device: its memory must be at least 2 MiB");
  memory_fd_ = memfd_create("trae_mem", MFD_CLOEXEC);
  if (memory_fd_ < 0) throw DeviceError(with_errno("host device: memfd_create"));
  void* base = mmap(nullptr, capacity_, kReadWrite, MAP_SHARED | MAP_NORESERVE, memory_fd_, 0);
  if (base == MAP_FAILED) {
    close(memory_fd_);
    throw DeviceError(with_errno("host device: no addresses for " + format_bytes(capacity_)));
  }
  base_ = static_cast<std::byte*>(base);
}

HostMemory::~HostMemory() {
  munmap(base_, capacity_);
  close(memory_fd_);
}

PageHandle HostMemory::create(std::size_t bytes) {
  if (bytes > capacity_ - used_) {
    throw OutOfMemory("host device: no room for " + format_bytes(bytes) + ": " +
                      format_bytes(used_) + " of " + format_bytes(capacity_) + " in use");
  }
  const std::size_t offset = take_range(bytes);
  used_ += bytes;
  const std::uint64_t id = next_handle_++;
  handles_[id] = std::make_shared<Pages>(Pages{offset, bytes, 0, false});
  return PageHandle{id};
}

void HostMemory::release(PageHandle handle) {
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  if (found == handles_.end()) throw InvalidArgument("release: not a page handle");
  found->second->released = true;
  free_if_unused(*found->second);
  handles_.erase(found);
}

std::shared_ptr<HostMemory::Pages> HostMemory::find(PageHandle handle) const {
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  return found == handles_.end() ? nullptr : found->second;
}

void HostMemory::map(Address address, Pages& pages) {
  if (mmap(reinterpret_cast<void*>(address), pages.bytes, kReadWrite, MAP_SHARED | MAP_FIXED,
           memory_fd_, static_cast<off_t>(pages.offset)) == MAP_FAILED) {
    throw DeviceError(with_errno("map: " + format_bytes(pages.bytes)));
  }
  ++pages.mappings;
}

void HostMemory::unmapped(Pages& pages) {
  --pages.mappings;
  free_if_unused(pages);
}

std::span<std::byte> HostMemory::base_bytes(const Pages& pages) const {
  return {base_ + pages.offset, pages.bytes};
}

void HostMemory::free_if_unused(const Pages& pages) {
  if (!pages.released || pages.mappings > 0) return;
  used_ -= pages.bytes;
  give_back_range(pages.offset, pages.bytes);
}

std::size_t HostMemory::take_range(std::size_t bytes) {
  for (auto range = free_ranges_.begin(); range != free_ranges_.end(); ++range) {
    const auto [offset, length] = *range;
    if (length < bytes) continue;
    free_ranges_.erase(range);
    if (length > bytes) free_ranges_.emplace(offset + bytes, length - bytes);
    return offset;
  }
  // Free ranges that are each too short may add up to enough: a handle is contiguous all the same.
  if (bytes > capacity_ - end_) {
    throw OutOfMemory("host device: no contiguous room for " + format_bytes(bytes));
  }
  if (ftruncate(memory_fd_, static_cast<off_t>(end_ + bytes)) != 0) {
    throw DeviceError(with_errno("create: cannot grow by " + format_bytes(bytes)));
  }
  return std::exchange(end_, end_ + bytes);
}

void HostMemory::give_back_range(std::size_t offset, std::size_t bytes) {
  fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
  // Neighbours become one, and a range at the end gives the file's length back.
  const auto next = free_ranges_.find(offset + bytes);
  if (next != free_ranges_.end()) {
    bytes += next->second;
    free_ranges_.erase(next);
  }
  const auto behind = free_ranges_.lower_bound(offset);
  if (behind != free_ranges_.begin()) {
    const auto previous = std::prev(behind);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      free_ranges_.erase(previous);
    }
  }
  if (offset + bytes == end_) {
    end_ = offset;
  } else {
    free_ranges_.emplace(offset, bytes);
  }
}

void HostMemory::check_invariants(std::map<const Pages*, std::size_t> mapped) const {
  for (const auto& [id, pages] : handles_) mapped.try_emplace(pages.get(), 0);
  std::size_t living = 0;
  for (const auto& [pages, count] : mapped) {
    if (pages->mappings != count) throw Error("a page's count of mappings is wrong");
    living += pages->bytes;
  }
  if (living != used_) throw Error("the count of used bytes is wrong");
  std::size_t free = 0;
  for (const auto& [offset, bytes] : free_ranges_) free += bytes;
  if (free + used_ != end_) throw Error("free and used bytes do not add up");
}

}  // namespace trae_mem
