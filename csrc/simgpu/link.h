// The bus between host and device in pace mode: one engine for each direction, on which copies
// follow each other, those of streams with a higher priority first. Times are modelled, so that a
// late thread does not make the bus slower.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <tuple>

#include "completion.h"

namespace simgpu {

class Link {
 public:
  // Waits for its turn and takes the link; returns when the copy ends, which may lie ahead.
  // `ready`: when the copy could begin, not later than now. A lower `priority` goes first.
  Time take(Time ready, std::size_t bytes, double bytes_per_second, int priority);
  [[nodiscard]] double busy_seconds() const;

 private:
  using Turn = std::tuple<int, Time, std::uint64_t>;  // priority, ready, a number of its own

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Turn> waiting_;
  std::uint64_t turns_ = 0;
  Time free_at_{};
  double busy_ = 0;
};

}  // namespace simgpu
