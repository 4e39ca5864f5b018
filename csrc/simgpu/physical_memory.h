// The physical memory of one device: a memfd whose ranges are handed out, so that one range can be
// mapped at many addresses. Offsets are never used twice (the file is sparse; a range that is
// given back is punched out), which makes fresh memory zero, or NaN with poison. In dry mode bytes
// are only counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace simgpu {

class PhysicalMemory;

// A range of physical memory; gives it back when it goes.
class Allocation {
 public:
  Allocation(PhysicalMemory& memory, std::uint64_t offset, std::size_t bytes);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  // Makes its first `bytes` appear at `address`, without access; false if the system refuses.
  [[nodiscard]] bool map_at(std::uintptr_t address, std::size_t bytes) const;
  void fill_with_nan() const;

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] int device() const;

  int mappings = 0;  // how many mappings show it; kept by the address space

 private:
  PhysicalMemory& memory_;
  const std::uint64_t offset_;
  const std::size_t bytes_;
};

class PhysicalMemory {
 public:
  PhysicalMemory(int device, std::uint64_t capacity) : device_(device), capacity_(capacity) {}

  // Null when that much is not free.
  std::shared_ptr<Allocation> create(std::size_t bytes);

  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] std::uint64_t capacity() const;
  [[nodiscard]] std::uint64_t used() const;
  [[nodiscard]] std::uint64_t peak() const;
  void reset_peak();
  void set_capacity(std::uint64_t bytes);

 private:
  friend class Allocation;
  void give_back(std::uint64_t offset, std::size_t bytes);

  const int device_;
  mutable std::mutex mutex_;
  std::uint64_t capacity_;
  std::uint64_t used_ = 0;
  std::uint64_t peak_ = 0;
  std::uint64_t end_ = 0;  // of the file
  int file_ = -1;          // made at the first allocation; lives as long as the process
};

}  // namespace simgpu
