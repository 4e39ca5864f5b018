#include "physical_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "configuration.h"
#include "settings.h"

namespace simgpu {

Allocation::Allocation(PhysicalMemory& memory, std::uint64_t offset, std::size_t bytes)
    : memory_(memory), offset_(offset), bytes_(bytes) {}

Allocation::~Allocation() { memory_.give_back(offset_, bytes_); }

int Allocation::device() const { return memory_.device(); }

bool Allocation::map_at(std::uintptr_t address, std::size_t bytes) const {
  if (configuration().dry) return true;
  void* const made = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                          MAP_SHARED | MAP_FIXED, memory_.file_, static_cast<off_t>(offset_));
  return made != MAP_FAILED;
}

void Allocation::fill_with_nan() const {
  if (configuration().dry) return;
  void* const view = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.file_,
                          static_cast<off_t>(offset_));
  if (view == MAP_FAILED) return;
  std::memset(view, 0xFF, bytes_);
  munmap(view, bytes_);
}

std::shared_ptr<Allocation> PhysicalMemory::create(std::size_t bytes) {
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    if (bytes == 0 || used_ > capacity_ || bytes > capacity_ - used_) return nullptr;
    if (!configuration().dry) {
      if (file_ < 0) file_ = memfd_create("simulated-gpu", MFD_CLOEXEC);
      if (file_ < 0 || ftruncate(file_, static_cast<off_t>(end_ + bytes)) != 0) return nullptr;
    }
    offset = end_;
    end_ += bytes;
    used_ += bytes;
    peak_ = std::max(peak_, used_);
  }
  auto made = std::make_shared<Allocation>(*this, offset, bytes);
  if (settings().poison) made->fill_with_nan();
  return made;
}

void PhysicalMemory::give_back(std::uint64_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  used_ -= bytes;
  if (file_ >= 0) {
    (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes));
  }
}

std::uint64_t PhysicalMemory::capacity() const {
  const std::lock_guard lock(mutex_);
  return capacity_;
}

std::uint64_t PhysicalMemory::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::uint64_t PhysicalMemory::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

void PhysicalMemory::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_ = used_;
}

void PhysicalMemory::set_capacity(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  capacity_ = bytes;
}

}  // namespace simgpu
