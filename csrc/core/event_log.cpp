#include "event_log.h"

#include <algorithm>

#include "error.h"

namespace trae_mem {

EventLog::EventLog(std::size_t capacity) : capacity_(capacity) {
  if (capacity == 0) throw InvalidArgument("event log: it must keep at least one entry");
  ring_.reserve(capacity);
}

void EventLog::add(const LogEntry& entry) {
  const std::lock_guard lock(mutex_);
  if (ring_.size() < capacity_) {
    ring_.push_back(entry);
  } else {
    ring_[count_ % capacity_] = entry;
  }
  ++count_;
}

EventLog::Batch EventLog::read(std::uint64_t from) const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t oldest = count_ - ring_.size();
  Batch batch{{}, count_, from < oldest ? oldest - from : 0};
  const std::uint64_t begin = std::max(from, oldest);
  if (begin >= count_) return batch;
  batch.entries.reserve(static_cast<std::size_t>(count_ - begin));
  for (std::uint64_t number = begin; number < count_; ++number) {
    batch.entries.push_back(ring_[number % capacity_]);
  }
  return batch;
}

void EventLog::check_invariants() const {
  const std::lock_guard lock(mutex_);
  if (ring_.size() != std::min<std::uint64_t>(count_, capacity_)) {
    throw Error("the event log's ring has the wrong size");
  }
}

}  // namespace trae_mem
