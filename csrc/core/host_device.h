// RAM as a device: physical pages are ranges of one memfd, mapping is mmap, streams are threads.
//
// Everything that a GPU offers is here for real: one page mapped at many addresses shows the
// same bytes, copies run beside the caller's compute, an event orders two streams. The calling
// thread is the compute stream (kCallerStream): waiting there blocks, recording there is done
// at once.
//
// Host code writes pages through one *base mapping* of the memfd, whose page-table entries stay;
// the windows that alias those pages are only read by compute. Each page-table entry counts as
// resident memory, so `rest` drops those of a window and `prepare` brings them back in one call:
// the process's RSS stays at what the pages really hold, however many windows alias them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "fault_plan.h"
#include "host_link.h"
#include "host_stream.h"

namespace trae_mem {

struct HostDeviceOptions {
  std::size_t memory_bytes = 0;             // capacity; 0: the machine's RAM
  std::uint64_t link_bytes_per_second = 0;  // 0: no limit
  std::string faults;                       // see fault_plan.h; operations are method names
  std::uint64_t random_delay_us = 0;        // longest delay before each piece of stream work
  std::uint64_t seed = 0;                   // of those delays

  static HostDeviceOptions from_environment();
};

class HostDevice final : public Device {
 public:
  explicit HostDevice(HostDeviceOptions options);
  ~HostDevice() override;

  [[nodiscard]] DeviceInfo info() const override;
  Address reserve(std::size_t bytes) override;
  void free_addresses(Address address, std::size_t bytes) override;
  PageHandle create(std::size_t bytes) override;
  void release(PageHandle handle) override;
  void map(Address address, std::size_t bytes, PageHandle handle) override;
  void unmap(Address address, std::size_t bytes) override;

  StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) override;
  void synchronize(StreamHandle stream) override;
  EventHandle create_event() override;
  void destroy_event(EventHandle event) override;
  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  [[nodiscard]] bool query(EventHandle event) const override;
  void synchronize(EventHandle event) override;

  void copy_to_device(Address to, const void* from, std::size_t bytes,
                      StreamHandle stream) override;
  void copy_to_device(Address to, std::shared_ptr<const ByteSource> from, std::size_t bytes,
                      StreamHandle stream) override;
  void copy_to_host(void* to, Address from, std::size_t bytes, StreamHandle stream) override;
  void fill(Address to, std::uint8_t value, std::size_t bytes, StreamHandle stream) override;
  void run(std::function<void()> work, StreamHandle stream) override;
  void prepare(Address address, std::size_t bytes, StreamHandle stream) override;
  void rest(Address address, std::size_t bytes, StreamHandle stream) override;

  std::unique_ptr<HostBuffer> allocate_host(std::size_t bytes) override;

  // Every mapping lies in a reservation and refers to living pages; the counters add up.
  void check_invariants() const;

 private:
  struct Pages {         // one handle's physical memory
    std::size_t offset;  // in the memfd
    std::size_t bytes;
    std::size_t mappings;  // how often it is mapped
    bool released;         // the handle is gone; the last unmap frees the memory
  };
  struct Mapping {
    std::size_t bytes;
    std::shared_ptr<Pages> pages;
  };

  void submit(StreamHandle stream, std::function<void()> task);
  [[nodiscard]] std::shared_ptr<HostStream> find_stream(StreamHandle stream) const;
  [[nodiscard]] std::shared_ptr<Completion> find_completion(EventHandle event) const;
  // The mapped bytes [address, address + bytes) as pieces of the base mapping.
  [[nodiscard]] std::vector<std::span<std::byte>> pieces(Address address, std::size_t bytes) const;
  void transfer(const std::vector<std::span<std::byte>>& to,
                const std::function<void(std::size_t, std::span<std::byte>)>& write_piece);
  // A free range of the memfd; throws OutOfMemory. With mutex_ held, as the two that follow.
  std::size_t take_range(std::size_t bytes);
  void give_back_range(std::size_t offset, std::size_t bytes);
  void free_if_unused(const Pages& pages);
  [[nodiscard]] bool is_reserved(Address address, std::size_t bytes) const;  // with mutex_ held
  void advise(Address begin, std::size_t length, int advice);
  void random_delay();

  const HostDeviceOptions options_;
  mutable FaultPlan faults_;
  HostLink link_;
  int memory_fd_ = -1;  // the memfd behind all pages
  std::size_t capacity_ = 0;
  std::byte* base_ = nullptr;  // the base mapping of capacity_ bytes

  mutable std::mutex mutex_;                        // guards all below
  std::size_t end_ = 0;                             // of the memfd
  std::size_t used_ = 0;                            // bytes of living pages
  std::map<std::size_t, std::size_t> free_ranges_;  // offset -> bytes, below end_, never adjacent
  std::map<Address, std::size_t> reservations_;     // address -> bytes
  std::map<Address, Mapping> mappings_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Pages>> handles_;
  std::unordered_map<std::uintptr_t, std::shared_ptr<HostStream>> streams_;
  std::unordered_map<std::uintptr_t, std::shared_ptr<Completion>> events_;  // null: not recorded
  std::uint64_t next_id_ = 1;  // of handles, streams and events

  std::mutex random_mutex_;
  std::mt19937_64 random_;
};

}  // namespace trae_mem
