#include "completion.h"

#include <utility>

#include "clock.h"

namespace trae_mem {

void Completion::finish(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    finished_ns_ = now_ns();
    error_ = std::move(error);
  }
  changed_.notify_all();
}

void Completion::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return finished_ns_.has_value(); });
}

void Completion::wait_or_throw() const {
  wait();
  if (const std::exception_ptr failure = error()) std::rethrow_exception(failure);
}

bool Completion::wait_for(std::chrono::milliseconds patience) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [this] { return finished_ns_.has_value(); });
}

bool Completion::finished() const { return finished_ns().has_value(); }

std::exception_ptr Completion::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::optional<std::int64_t> Completion::finished_ns() const {
  const std::lock_guard lock(mutex_);
  return finished_ns_;
}

}  // namespace trae_mem
