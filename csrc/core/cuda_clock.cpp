#include "cuda_clock.h"

#include <cmath>
#include <utility>

#include "clock.h"
#include "error.h"

namespace trae_mem {
CudaClock::CudaClock(std::shared_ptr<const CudaContext> context, std::shared_ptr<HostCalls> calls,
                     std::chrono::nanoseconds age)
    : context_(std::move(context)),
      driver_(context_->driver()),
      calls_(std::move(calls)),
      age_ns_(age.count()),
      stream_(context_),
      next_(begin_reference()) {}

std::unique_ptr<CudaClock::Reference> CudaClock::begin_reference() {
  // Not make_unique: an event cannot be moved into place.
  std::unique_ptr<Reference> made(
      new Reference{std::make_shared<std::atomic<std::int64_t>>(0), {context_, /*timed=*/true}});
  calls_->launch(stream_.pointer(), [noted = made->host_ns] { *noted = now_ns(); }, "time_ns");
  context_->check(driver_.cuEventRecord(made->event.pointer(), stream_.pointer()), "time_ns",
                  "cuEventRecord");
  return made;
}

void CudaClock::renew() {
  if (next_ != nullptr) {
    const cuda::Result result = driver_.cuEventQuery(next_->event.pointer());
    if (result == cuda::kNotReady) return;
    context_->check(result, "time_ns", "cuEventQuery");
    current_ = std::move(next_);
  } else if (current_ == nullptr || now_ns() - *current_->host_ns > age_ns_) {
    next_ = begin_reference();
  }
}

void CudaClock::synchronize() noexcept {
  CudaDriver::insist([this] { return driver_.cuStreamSynchronize(stream_.pointer()); });
}

std::optional<std::int64_t> CudaClock::host_ns(cuda::EventPointer event) {
  const std::lock_guard lock(mutex_);
  renew();
  if (current_ == nullptr) return std::nullopt;
  float milliseconds = 0;
  const cuda::Result result =
      driver_.cuEventElapsedTime(&milliseconds, current_->event.pointer(), event);
  if (result == cuda::kNotReady) return std::nullopt;
  context_->check(result, "time_ns", "cuEventElapsedTime");
  return *current_->host_ns + std::llround(static_cast<double>(milliseconds) * 1e6);
}

}  // namespace trae_mem
