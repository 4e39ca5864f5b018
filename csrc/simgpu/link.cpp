#include "link.h"

#include <algorithm>

namespace simgpu {

Time Link::take(Time ready, std::size_t bytes, double bytes_per_second, int priority) {
  const double seconds = bytes_per_second > 0 ? static_cast<double>(bytes) / bytes_per_second : 0.0;
  std::unique_lock lock(mutex_);
  const Turn turn{priority, ready, ++turns_};
  waiting_.insert(turn);
  // Only once the link is free is it decided who is next: a copy that comes late may go first.
  while (free_at_ > Clock::now() || *waiting_.begin() != turn) {
    if (free_at_ > Clock::now()) {
      changed_.wait_until(lock, free_at_);
    } else {
      changed_.wait(lock);
    }
  }
  waiting_.erase(turn);
  const Time begin = std::max(ready, free_at_);
  free_at_ =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  busy_ += seconds;
  changed_.notify_all();
  return free_at_;
}

double Link::busy_seconds() const {
  const std::lock_guard lock(mutex_);
  return busy_;
}

}  // namespace simgpu
