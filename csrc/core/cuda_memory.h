// Addresses and physical memory of a GPU: who reserved, created and mapped what.
//
// The driver would refuse most misuse too, but not all of it, and not by name: touching a range
// that is not mapped, for one, loses the context of the whole process. So the tables here are
// asked first.
//
// Ownership. What is not given back when this object goes is given back then. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cuda_context.h"
#include "device.h"

namespace trae_mem {

class CudaMemory {
 public:
  // `limit_bytes`: most that `create` gives; 0: what the GPU has.
  CudaMemory(std::shared_ptr<const CudaContext> context, std::size_t limit_bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // As the methods of Device of the same name.
  Address reserve(std::size_t bytes);
  void free_addresses(Address address, std::size_t bytes);
  PageHandle create(std::size_t bytes);
  void release(PageHandle handle);
  void map(Address address, std::size_t bytes, PageHandle handle);
  void unmap(Address address, std::size_t bytes);

  // Throws InvalidArgument unless all of [address, address + bytes) is mapped.
  void require_mapped(Address address, std::size_t bytes) const;
  [[nodiscard]] std::size_t used_bytes() const;
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  void check_invariants() const;

 private:
  struct Pages {  // one allocation
    cuda::Allocation allocation;
    std::size_t bytes;
    std::size_t mappings = 0;
    bool released = false;  // the handle is gone; the last unmap frees the memory
  };
  struct Reservation {
    std::size_t bytes;
    std::size_t mapped_bytes = 0;
  };
  struct Mapping {
    std::size_t bytes;
    std::shared_ptr<Pages> pages;
  };
  using Reservations = std::map<Address, Reservation>;

  // The reservation that the range lies in, or end(); with mutex_ held, as all below.
  [[nodiscard]] Reservations::const_iterator reservation_of(Address address,
                                                            std::size_t bytes) const;
  void unmapped(std::map<Address, Mapping>::iterator mapping);
  void free_if_unused(const Pages& pages);

  const std::shared_ptr<const CudaContext> context_;
  const CudaDriver& driver_;
  std::size_t capacity_;      // the GPU's memory, or the limit; never changes
  mutable std::mutex mutex_;  // guards all below
  Reservations reservations_;
  std::map<Address, Mapping> mappings_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Pages>> handles_;
  std::uint64_t next_handle_ = 1;  // never used again, unlike the driver's own
  std::size_t used_bytes_ = 0;
};

}  // namespace trae_mem
