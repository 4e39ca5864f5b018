#include "completion.h"

#include <thread>

namespace simgpu {

void Completion::finish(Time at) {
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
    time_ = at;
  }
  changed_.notify_all();
}

Time Completion::wait_processed() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return finished_; });
  return time_;
}

void Completion::wait() const {
  const Time at = wait_processed();
  if (at > Clock::now()) std::this_thread::sleep_until(at);
}

bool Completion::reached() const {
  const std::lock_guard lock(mutex_);
  return finished_ && time_ <= Clock::now();
}

bool Completion::processed() const {
  const std::lock_guard lock(mutex_);
  return finished_;
}

Time Completion::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

}  // namespace simgpu
