#include "load_journal.h"

#include <optional>
#include <utility>

#include "clock.h"

namespace trae_mem {

void LoadJournal::add(std::shared_ptr<Load> load) {
  const std::uint32_t unit = load->unit;
  const std::uint32_t slot = load->slot;
  copies_.push_back({std::move(load), unit, slot, nullptr});
}

void LoadJournal::add_eviction(std::uint32_t unit, std::uint32_t slot,
                               std::shared_ptr<const EventPool::Lease> when) {
  copies_.push_back({nullptr, unit, slot, std::move(when)});
}

void LoadJournal::add(MeasuredWait wait) { waits_.push_back(std::move(wait)); }

void LoadJournal::harvest() noexcept {
  try {
    while (!copies_.empty() && note_copy(copies_.front())) copies_.pop_front();
    while (!waits_.empty() && note_wait(waits_.front())) waits_.pop_front();
  } catch (...) {
    // Figures are not worth a failed step; a device that is broken tells so elsewhere.
  }
}

bool LoadJournal::note_copy(const CopyEntry& entry) {
  if (entry.load != nullptr) return note_load(*entry.load);
  const std::optional<std::int64_t> when =
      entry.when == nullptr ? now_ns() : device_->time_ns(entry.when->handle());
  if (!when.has_value()) return false;
  log_.add({EventKind::kEvict, entry.unit, entry.slot, 0, *when, *when});
  return true;
}

bool LoadJournal::note_load(Load& load) {
  const std::optional<std::int64_t> end = device_->time_ns(load.end.handle());
  if (!end.has_value()) return false;
  const std::optional<std::int64_t> begin = device_->time_ns(load.begin.handle());
  if (!begin.has_value()) return false;
  try {
    device_->synchronize(load.end.handle());  // is reached: does not block
  } catch (...) {
    load.failed = true;
  }
  log_.add({EventKind::kLoad, load.unit, load.slot, load.bytes, *begin, *end});
  sums_.load_ns += *end - *begin;
  return true;
}

bool LoadJournal::note_wait(const MeasuredWait& wait) {
  const std::optional<std::int64_t> end = device_->time_ns(wait.end.handle());
  if (!end.has_value()) return false;
  const std::optional<std::int64_t> begin = device_->time_ns(wait.begin.handle());
  const std::optional<std::int64_t> loaded = device_->time_ns(wait.load->end.handle());
  if (!begin.has_value() || !loaded.has_value()) return false;
  if (*loaded <= *begin) {  // done by the time that compute got there
    ++sums_.hits;
    return true;
  }
  log_.add({EventKind::kStall, wait.load->unit, wait.load->slot, 0, *begin, *end});
  ++sums_.stalls;
  sums_.stall_ns += *end - *begin;
  return true;
}

}  // namespace trae_mem
