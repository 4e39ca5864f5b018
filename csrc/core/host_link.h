// The link of a host device: a token bucket that makes copies as slow as a chosen bus, so that
// the overlap of copies and compute can be studied on a machine without one.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>

namespace trae_mem {

class HostLink {
 public:
  // 0: no limit. One link serves all streams, as a bus does.
  explicit HostLink(std::uint64_t bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  // Called after `bytes` were moved since `begin`: waits until the link would have moved them.
  void pace(std::size_t bytes, std::chrono::steady_clock::time_point begin) {
    if (bytes_per_second_ == 0) return;
    const std::chrono::steady_clock::time_point end = book(bytes, begin);
    std::this_thread::sleep_until(end);
    excuse(std::max(std::chrono::steady_clock::now() - end, {}));
  }

  // What a stream did between two transfers that no bus would have waited for (page-table work, a
  // sleep that ended late): the next transfer counts as begun that much earlier, if the link was
  // free then. Capped: after a machine's long pause the link must not run ahead for many transfers.
  void excuse(std::chrono::steady_clock::duration duration) {
    const std::lock_guard lock(mutex_);
    excused_ = std::min<std::chrono::steady_clock::duration>(excused_ + duration, kMostExcused);
  }

  // Takes the link for `bytes` from `begin` on, behind what was booked before; returns when they
  // are through. Needs a speed.
  std::chrono::steady_clock::time_point book(std::size_t bytes,
                                             std::chrono::steady_clock::time_point begin) {
    const auto duration = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(static_cast<double>(bytes) /
                                      static_cast<double>(bytes_per_second_)));
    const std::lock_guard lock(mutex_);
    free_at_ = std::max(free_at_, begin - std::exchange(excused_, {})) + duration;
    return free_at_;
  }

 private:
  static constexpr auto kMostExcused = std::chrono::milliseconds(5);

  std::uint64_t bytes_per_second_;
  std::mutex mutex_;
  std::chrono::steady_clock::duration excused_{};  // since the last transfer
  std::chrono::steady_clock::time_point free_at_;  // when the bytes moved so far are through
};

}  // namespace trae_mem
