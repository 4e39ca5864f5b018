// What the streamer did and when: a ring buffer that is always on, and totals that never wrap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "clock.h"

namespace trae_mem {

enum class EventKind : std::uint8_t {
  kLoad,     // bytes of a unit were copied into its window
  kAcquire,  // a use of a unit begins (an instant)
  kRelease,  // and ends (an instant)
  kStall,    // compute waited for a load (begin to end of the wait)
  kEvict,    // another load takes the unit's slot (an instant)
};

struct LogEntry {
  EventKind kind;
  std::uint32_t unit;
  std::uint32_t slot;
  std::uint64_t bytes;  // of a load; 0 otherwise
  std::int64_t begin_ns;
  std::int64_t end_ns;  // == begin_ns for instants
};

class EventLog {
 public:
  struct Batch {
    std::vector<LogEntry> entries;
    std::uint64_t next;  // pass as `from` to read on
    std::uint64_t lost;  // entries that were overwritten before they were read
  };

  // Keeps the last `capacity` entries. Thread-safe.
  explicit EventLog(std::size_t capacity);

  void add(const LogEntry& entry);
  // The entries numbered `from` and up, oldest first; numbers count from 0.
  [[nodiscard]] Batch read(std::uint64_t from) const;
  void check_invariants() const;

 private:
  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::vector<LogEntry> ring_;  // entry n at n % capacity_
  std::uint64_t count_ = 0;     // entries added so far
};

}  // namespace trae_mem
