// RAM as a device: physical pages are ranges of one memfd (host_memory.h), mapping is mmap, streams
// are threads.
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
//
// Ownership. The device owns addresses, mappings, streams and events; its HostMemory owns the
// pages. Both are guarded by one mutex, which is never held while stream work runs or is waited
// for.
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
#include "host_memory.h"
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
  EventHandle create_event(bool timed) override;
  void destroy_event(EventHandle event) override;
  void record(EventHandle event, StreamHandle stream) override;
  void mark(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  [[nodiscard]] bool query(EventHandle event) const override;
  void synchronize(EventHandle event) override;
  [[nodiscard]] std::optional<std::int64_t> time_ns(EventHandle event) const override;

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
  struct Mapping {
    std::size_t bytes;
    std::shared_ptr<HostMemory::Pages> pages;
  };

  void submit(StreamHandle stream, std::function<void()> task);
  [[nodiscard]] std::shared_ptr<HostStream> find_stream(StreamHandle stream) const;
  [[nodiscard]] std::shared_ptr<Completion> find_completion(EventHandle event) const;
  // The mapped bytes [address, address + bytes) as pieces of the base mapping.
  [[nodiscard]] std::vector<std::span<std::byte>> pieces(Address address, std::size_t bytes) const;
  void transfer(const std::vector<std::span<std::byte>>& to,
                const std::function<void(std::size_t, std::span<std::byte>)>& write_piece);
  [[nodiscard]] bool is_reserved(Address address, std::size_t bytes) const;  // with mutex_ held
  // madvise of the pages around a mapped range, in the stream.
  void advise(Address address, std::size_t bytes, int advice, StreamHandle stream);
  void random_delay();

  const HostDeviceOptions options_;
  mutable FaultPlan faults_;
  HostLink link_;

  mutable std::mutex mutex_;  // guards all below, up to next_id_
  HostMemory memory_;
  std::map<Address, std::size_t> reservations_;  // address -> bytes
  std::map<Address, Mapping> mappings_;
  std::unordered_map<std::uintptr_t, std::shared_ptr<HostStream>> streams_;
  std::unordered_map<std::uintptr_t, std::shared_ptr<Completion>> events_;  // null: not recorded
  // Of streams and events.
  std::uint64_t next_id_ = 1;

  std::mutex random_mutex_;
  std::mt19937_64 random_;
};

}  // namespace trae_mem
