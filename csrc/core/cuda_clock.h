// When a GPU's stream passed a timed event, on the host's clock.
//
// The driver tells the time between two events. So one of them is a *reference*: host code on a
// stream of ours notes the time, and an event stands right behind it. The driver's figure is a
// float of milliseconds, which loses microseconds within a minute, and the two clocks drift apart:
// a reference is replaced after a few seconds. Nothing here waits. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "cuda_handles.h"
#include "host_calls.h"

namespace trae_mem {

class CudaClock {
 public:
  static constexpr std::chrono::nanoseconds kReferenceAge = std::chrono::seconds(8);

  // Both under a Guard; they throw what the driver throws. `age`: when a reference is replaced.
  CudaClock(std::shared_ptr<const CudaContext> context, std::shared_ptr<HostCalls> calls,
            std::chrono::nanoseconds age = kReferenceAge);
  // Nothing: the event is not reached, or the first reference is not.
  std::optional<std::int64_t> host_ns(cuda::EventPointer event);
  // Waits for the references that are under way: what was reached by then has a time behind it.
  // Under a Guard.
  void synchronize() noexcept;

 private:
  struct Reference {
    std::shared_ptr<std::atomic<std::int64_t>> host_ns;
    CudaEvent event;
  };
  [[nodiscard]] std::unique_ptr<Reference> begin_reference();
  void renew();

  const std::shared_ptr<const CudaContext> context_;
  const CudaDriver& driver_;
  const std::shared_ptr<HostCalls> calls_;
  const std::int64_t age_ns_;
  std::mutex mutex_;  // guards all below
  CudaStream stream_;
  std::unique_ptr<Reference> current_;  // null until the first one is reached
  std::unique_ptr<Reference> next_;     // queued, to take its place
};

}  // namespace trae_mem
