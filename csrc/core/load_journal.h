// What the copy stream did and how long compute waited for it, noted once the device has told.
//
// A load, an eviction and a wait happen in streams, later than they are queued. Timed events stand
// around them; `harvest` looks which are reached, without blocking, and writes the event log and
// the sums. So nothing has to run in a stream for the log's sake.
//
// Not thread-safe: its owner's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "event_log.h"
#include "event_pool.h"

namespace trae_mem {

// One load of a unit. Its events live as long as somebody may wait for it.
struct Load {
  std::uint32_t unit;
  std::uint32_t slot;
  std::uint64_t bytes;
  EventPool::Lease begin;  // marked in front of its copies
  EventPool::Lease end;    // recorded behind them: what its users wait for
  bool used = false;       // somebody acquired it, and so learns of a failure
  bool failed = false;     // found out by a harvest
};

// One wait of a stream for a load that was not done when it was asked for.
struct MeasuredWait {
  std::shared_ptr<const Load> load;
  EventPool::Lease begin;  // marked in the waiting stream in front of the wait
  EventPool::Lease end;    // and behind it
};

struct JournalSums {
  std::int64_t load_ns = 0;  // the copies' own time, one behind the other
  std::uint64_t hits = 0;    // waits that turned out to be none
  std::uint64_t stalls = 0;
  std::int64_t stall_ns = 0;
};

class LoadJournal {
 public:
  LoadJournal(std::shared_ptr<Device> device, EventLog& log)
      : device_(std::move(device)), log_(log) {}

  void add(std::shared_ptr<Load> load);
  // The slot gave up the unit's bytes when the copy stream passed `when`; null: now.
  void add_eviction(std::uint32_t unit, std::uint32_t slot,
                    std::shared_ptr<const EventPool::Lease> when);
  void add(MeasuredWait wait);

  // Notes what is known by now. Never blocks; what the device refuses to tell is tried again later.
  void harvest() noexcept;
  [[nodiscard]] const JournalSums& sums() const noexcept { return sums_; }

 private:
  struct CopyEntry {
    std::shared_ptr<Load> load;  // null: an eviction
    std::uint32_t unit;
    std::uint32_t slot;
    std::shared_ptr<const EventPool::Lease> when;  // of an eviction
  };

  // Each returns false while its events are not reached.
  bool note_copy(const CopyEntry& entry);
  bool note_load(Load& load);
  bool note_wait(const MeasuredWait& wait);

  std::shared_ptr<Device> device_;
  EventLog& log_;
  std::deque<CopyEntry> copies_;    // in the order of the copy stream
  std::deque<MeasuredWait> waits_;  // in the order of the acquires
  JournalSums sums_;
};

}  // namespace trae_mem
