// A point that host code reaches once: whether it did, when, and what went wrong before it.
//
// Shared by whoever brings it about and everyone who waits for it, so that recording an event again
// does not disturb those who wait for its earlier point.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>

namespace trae_mem {

class Completion {
 public:
  void finish(std::exception_ptr error);  // once
  void wait() const;                      // blocks; never throws what the work threw
  void wait_or_throw() const;
  bool wait_for(std::chrono::milliseconds patience) const;  // true: finished
  [[nodiscard]] bool finished() const;
  [[nodiscard]] std::exception_ptr error() const;
  [[nodiscard]] std::optional<std::int64_t> finished_ns() const;  // on the clock of now_ns()

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<std::int64_t> finished_ns_;
  std::exception_ptr error_;  // what the work before this point threw, or null
};

}  // namespace trae_mem
