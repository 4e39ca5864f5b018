// An NVIDIA GPU as a device, through the driver's API alone (cuda_driver.h).
//
// It shares the primary context with torch. A StreamHandle is a CUstream as it is
// (`torch.cuda.current_stream().cuda_stream`; 0, kCallerStream, the default stream), or a stream of
// ours, told apart by its highest bit. Ours have the highest priority and do not wait for the
// default stream. Nothing blocks the host but what says so: `synchronize`, `destroy_stream`,
// copies to host memory that is not pinned, and `wait` behind the reads of a source.
//
// Host work. Code that runs on the host in a stream's order (`run`, the reads of a source) may
// fail when the device cannot know. Each has a Completion; a stream keeps those that were queued
// since its last record, and a record hands them to its event: that is all of "a failure marks the
// next event" and "a failure travels through a wait". No call of the driver is needed for it.
//
// Lost contexts. After a fault in some kernel every call of the process fails. Calls then throw and
// say so, waits for host work end, and destructors are quiet, as they are in forked children and
// when the driver ends before us.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_clock.h"
#include "cuda_memory.h"
#include "device.h"
#include "host_calls.h"
#include "pinned_memory.h"
#include "staging_ring.h"

namespace trae_mem {

struct CudaDeviceOptions {
  int index = 0;                           // of the GPU, as torch counts
  std::size_t memory_bytes = 0;            // most that `create` gives; 0: what the GPU has
  std::size_t staging_bytes = 8ULL << 20;  // of each of the two staging buffers

  static CudaDeviceOptions from_environment(int index);
};

class CudaDevice final : public Device {
 public:
  // Throws DeviceUnavailable where there is no driver, no such GPU, or one that cannot do it.
  explicit CudaDevice(CudaDeviceOptions options,
                      std::shared_ptr<const CudaDriver> driver = CudaDriver::load());
  ~CudaDevice() override;

  [[nodiscard]] DeviceInfo info() const override;
  // Why host memory could not be pinned, and what that means; empty: it all is.
  [[nodiscard]] std::string pinning_note() const;

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
  // All windows of a GPU are mapped all the time, at no cost.
  void prepare(Address address, std::size_t bytes, StreamHandle stream) override;
  void rest(Address address, std::size_t bytes, StreamHandle stream) override;

  std::unique_ptr<HostBuffer> allocate_host(std::size_t bytes) override;

  void check_invariants() const;

 private:
  struct HostWork {
    std::shared_ptr<const Completion> completion;
    bool is_read;  // of a source: a wait blocks for it [Note: reads and waits]
  };
  using HostWorks = std::vector<HostWork>;
  struct EventState {
    EventState(const std::shared_ptr<const CudaContext>& context, bool is_timed)
        : event(context, is_timed), timed(is_timed) {}
    CudaEvent event;
    const bool timed;
    std::mutex mutex;  // guards all below: what the driver recorded and what we did are one
    bool recorded = false;
    HostWorks behind;  // host work in front of the last record
  };

  [[nodiscard]] std::shared_ptr<EventState> find(EventHandle event) const;
  // The driver's stream; `owner` keeps one of ours alive. Throws InvalidArgument for one that is
  // gone.
  [[nodiscard]] cuda::StreamPointer find(StreamHandle stream,
                                         std::shared_ptr<const CudaStream>& owner) const;
  // `operation`: record, which takes the stream's host work along, or mark.
  void record(EventHandle event, StreamHandle stream, bool with_work, const char* operation);
  void add_work(StreamHandle stream, const HostWorks& works);
  // Blocks until the work is done, or the context is found lost; throws what the work threw.
  void await(const HostWork& work, cuda::EventPointer behind, const char* operation) const;
  StagingRing& staging();                  // under a Guard
  [[nodiscard]] CudaClock* clock() const;  // null before the first timed event
  void drain() noexcept;                   // all work of our own streams

  const CudaDeviceOptions options_;
  const std::shared_ptr<const CudaContext> context_;
  const CudaDriver& driver_;
  const std::shared_ptr<HostCalls> calls_;
  const std::shared_ptr<PinnedMemory> pinned_;
  CudaMemory memory_;

  mutable std::mutex mutex_;              // guards all below
  std::unique_ptr<StagingRing> staging_;  // made when it is first needed
  std::unique_ptr<CudaClock> clock_;      // made with the first timed event
  std::unordered_map<std::uintptr_t, std::shared_ptr<const CudaStream>> streams_;
  std::unordered_map<std::uintptr_t, std::shared_ptr<EventState>> events_;
  std::unordered_map<std::uintptr_t, HostWorks> works_;  // by stream, since its last record
  std::uint64_t next_id_ = 1;                            // of streams and events
};

}  // namespace trae_mem
