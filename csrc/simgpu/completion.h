// A point in a stream that others wait for: one record of an event, or the end of a piece of work.
// Shared by everyone who waits, so that recording the event again does not disturb them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace simgpu {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

class Completion {
 public:
  // `at` is the modelled time of the point; with pace it may lie in the future of the clock.
  void finish(Time at);
  // Blocks until the point is processed; returns its time, without sleeping until then.
  Time wait_processed() const;
  // Blocks until the point is processed and its time has come.
  void wait() const;
  [[nodiscard]] bool reached() const;    // processed, and its time has come
  [[nodiscard]] bool processed() const;  // `wait_processed` would not block
  [[nodiscard]] Time time() const;       // meaningful once processed

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool finished_ = false;
  Time time_{};
};

}  // namespace simgpu
