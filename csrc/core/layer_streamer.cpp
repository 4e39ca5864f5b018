#include "layer_streamer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "error.h"

namespace trae_mem {
namespace {

// All bits set is a NaN in every floating-point format that weights have.
constexpr std::uint8_t kPoison = 0xFF;

}  // namespace

LayerStreamer::LayerStreamer(std::shared_ptr<PagePool> pool, std::shared_ptr<WeightStore> store,
                             LayerStreamerOptions options)
    : pool_(std::move(pool)),
      device_(pool_->device()),
      store_(std::move(store)),
      options_(std::move(options)),
      log_(options_.event_log_entries),
      timed_events_(device_),
      copy_stream_(*device_),
      journal_(device_, log_) {
  const std::size_t units = store_->units();
  if (!options_.resident.empty() && options_.resident.size() != units) {
    throw InvalidArgument("streamer: one resident flag a unit is needed");
  }
  for (std::size_t unit = 0; unit < units; ++unit) {
    if (store_->unit_bytes(unit) == 0) {
      throw InvalidArgument("streamer: unit " + std::to_string(unit) +
                            " has 0 bytes; leave units without weights out of the store");
    }
    if (options_.resident.empty() || !options_.resident[unit]) streamed_.push_back(unit);
  }
  if (options_.slots < std::min(options_.prefetch + 2, streamed_.size())) {
    throw InvalidArgument("streamer: prefetch " + std::to_string(options_.prefetch) + " needs " +
                          std::to_string(options_.prefetch + 2) + " slots, not " +
                          std::to_string(options_.slots));
  }
  place_units(*pool_);
  // A load holds two while its slot shows it, and two more until it is noted.
  timed_events_.prepare(4 * slots_.size());
  try {
    for (std::size_t unit = 0; unit < units; ++unit) {
      if (!units_[unit].streamed_rank.has_value()) start_load(unit);
    }
  } catch (...) {
    drain();  // the loads begun so far write to pages that go back to the pool now
    throw;
  }
}

LayerStreamer::~LayerStreamer() {
  try {
    drain();
  } catch (const Error&) {
    // What is in flight failed or cannot be waited for; the windows go all the same.
  }
}

void LayerStreamer::place_units(PagePool& pool) {
  const std::size_t shared = std::min(options_.slots, streamed_.size());
  std::size_t largest = 0;
  for (const std::size_t unit : streamed_) largest = std::max(largest, store_->unit_bytes(unit));
  if (shared > 0) {
    arenas_.push_back(std::make_unique<SlotArena>(pool, largest, shared));
    bytes_on_device_ += arenas_.back()->slot_bytes() * shared;
    slots_.resize(shared);
  }
  std::size_t rank = 0;
  for (std::size_t unit = 0; unit < store_->units(); ++unit) {
    const std::size_t bytes = store_->unit_bytes(unit);
    if (rank < streamed_.size() && streamed_[rank] == unit) {
      const std::size_t slot = rank % shared;
      units_.push_back({slot, rank, arenas_.front()->window(slot, bytes), {}});
      ++rank;
    } else {
      arenas_.push_back(std::make_unique<SlotArena>(pool, bytes, 1));
      bytes_on_device_ += arenas_.back()->slot_bytes();
      units_.push_back({slots_.size(), std::nullopt, arenas_.back()->window(0, bytes), {}});
      slots_.emplace_back();
    }
  }
}

Address LayerStreamer::window(std::size_t unit) const { return units_.at(unit).window->address(); }

void LayerStreamer::acquire(std::size_t unit, StreamHandle stream, Travel travel) {
  std::shared_ptr<Load> load;
  bool hit = false;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    Unit& wanted = units_.at(unit);
    journal_.harvest();
    first = !wanted.acquired();
    Slot& slot = slots_[wanted.slot];
    // Whoever acquired it then was told; a failure that nobody knows of is for this acquire.
    if (holds(unit) && first && slot.load->failed && slot.load->used) drop(slot);
    if (!holds(unit)) start_load(unit);
    load = slot.load;
    hit = device_->query(load->end.handle());
    prefetch(unit, travel);
    forget_user(unit, stream);
    wanted.users.push_back(stream);
    load->used = true;
    ++stats_.acquires;
  }
  try {
    wait_for_load(stream, load, !hit);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    forget_user(unit, stream);
    Slot& slot = slots_[units_[unit].slot];
    if (!units_[unit].acquired() && slot.load == load) drop(slot);
    throw;
  }
  const std::lock_guard lock(mutex_);
  if (hit) ++stats_.hits;
  journal_.harvest();
  if (first) log_instant(EventKind::kAcquire, unit);
}

void LayerStreamer::wait_for_load(StreamHandle stream, const std::shared_ptr<Load>& load,
                                  bool measured) {
  // A measurement that fails is none; the wait itself must not fail for it.
  const auto mark = [&](const EventPool::Lease& event) {
    try {
      device_->mark(event.handle(), stream);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  std::optional<EventPool::Lease> begin;
  std::optional<EventPool::Lease> end;
  if (measured) {
    try {
      begin.emplace(timed_events_.take());
      end.emplace(timed_events_.take());
      measured = mark(*begin);
    } catch (const Error&) {
      measured = false;
    }
  }
  device_->wait(stream, load->end.handle());
  if (!measured || !mark(*end)) return;
  const std::lock_guard lock(mutex_);
  journal_.add({load, std::move(*begin), std::move(*end)});
}

void LayerStreamer::release(std::size_t unit, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  Unit& used = units_.at(unit);
  if (std::find(used.users.begin(), used.users.end(), stream) == used.users.end()) return;
  Slot& slot = slots_[used.slot];
  Use& use = use_of(slot, stream);
  device_->record(use.released.handle(), stream);
  use.pending = true;
  forget_user(unit, stream);
  if (used.acquired()) return;
  log_instant(EventKind::kRelease, unit);
  if (options_.poison) {
    wait_for_uses(slot);
    drop(slot);
    device_->fill(used.window->address(), kPoison, used.window->bytes(), copy_stream_.handle());
  }
}

void LayerStreamer::forget_user(std::size_t unit, StreamHandle stream) {
  std::erase(units_[unit].users, stream);
}

LayerStreamer::Use& LayerStreamer::use_of(Slot& slot, StreamHandle stream) {
  Use* idle = nullptr;
  for (Use& use : slot.uses) {
    if (use.stream == stream) return use;
    if (!use.pending) idle = &use;
  }
  if (idle == nullptr) return slot.uses.emplace_back(Use{stream, Event(*device_)});
  idle->stream = stream;
  return *idle;
}

void LayerStreamer::wait_for_uses(Slot& slot) {
  for (Use& use : slot.uses) {
    if (!use.pending) continue;
    device_->wait(copy_stream_.handle(), use.released.handle());
    use.pending = false;
  }
}

void LayerStreamer::invalidate(std::size_t unit) {
  const std::lock_guard lock(mutex_);
  if (units_.at(unit).acquired()) throw InvalidArgument("invalidate: the unit is acquired");
  if (holds(unit)) drop(slots_[units_[unit].slot]);
}

bool LayerStreamer::holds(std::size_t unit) const {
  const Slot& slot = slots_[units_[unit].slot];
  return slot.fresh && slot.owner == unit;
}

void LayerStreamer::drop(Slot& slot, std::shared_ptr<const EventPool::Lease> when) {
  if (!slot.fresh) return;
  slot.fresh = false;
  if (when == nullptr) {
    try {
      when = std::make_shared<EventPool::Lease>(timed_events_.take());
      device_->mark(when->handle(), copy_stream_.handle());
    } catch (const Error&) {
      when = nullptr;
    }
  }
  const std::size_t unit = *slot.owner;
  journal_.add_eviction(static_cast<std::uint32_t>(unit),
                        static_cast<std::uint32_t>(units_[unit].slot), std::move(when));
}

void LayerStreamer::start_load(std::size_t unit) {
  Unit& target = units_[unit];
  Slot& slot = slots_[target.slot];
  const StreamHandle copies = copy_stream_.handle();
  if (slot.owner.has_value() && units_[*slot.owner].acquired()) {
    throw InvalidArgument("acquire: unit " + std::to_string(unit) + " needs the slot of unit " +
                          std::to_string(*slot.owner) + ", which is still acquired");
  }
  const auto load = std::make_shared<Load>(
      Load{static_cast<std::uint32_t>(unit), static_cast<std::uint32_t>(target.slot),
           target.window->bytes(), timed_events_.take(), timed_events_.take()});
  wait_for_uses(slot);
  device_->mark(load->begin.handle(), copies);
  drop(slot, {load, &load->begin});
  if (slot.owner.has_value() && *slot.owner != unit) {
    const LayerWindow& previous = *units_[*slot.owner].window;
    device_->rest(previous.address(), previous.bytes(), copies);
  }
  slot.owner = unit;
  slot.load = load;
  store_->load(unit, target.window->address(), *device_, copies);
  device_->prepare(target.window->address(), target.window->bytes(), copies);
  device_->record(load->end.handle(), copies);
  journal_.add(load);
  slot.fresh = true;
  ++stats_.loads;
  stats_.load_bytes += target.window->bytes();
}

std::vector<std::size_t> LayerStreamer::upcoming(std::size_t unit, Travel travel) const {
  std::vector<std::size_t> result;
  const auto count = static_cast<std::ptrdiff_t>(streamed_.size());
  const auto after = std::upper_bound(streamed_.begin(), streamed_.end(), unit);
  const auto from = std::lower_bound(streamed_.begin(), streamed_.end(), unit);
  const std::ptrdiff_t step = travel == Travel::kBackward ? -1 : 1;
  std::ptrdiff_t rank =
      travel == Travel::kBackward ? from - streamed_.begin() - 1 : after - streamed_.begin();
  while (result.size() + 1 < std::min(options_.slots, streamed_.size())) {
    if (travel == Travel::kForwardAround) rank %= std::max<std::ptrdiff_t>(count, 1);
    if (rank < 0 || rank >= count || streamed_[static_cast<std::size_t>(rank)] == unit) break;
    result.push_back(streamed_[static_cast<std::size_t>(rank)]);
    rank += step;
  }
  return result;
}

void LayerStreamer::prefetch(std::size_t unit, Travel travel) {
  if (options_.prefetch == 0) return;
  const std::vector<std::size_t> next = upcoming(unit, travel);
  std::size_t begun = 0;
  for (std::size_t i = 0; i < next.size() && begun < options_.prefetch; ++i) {
    if (holds(next[i])) continue;
    const std::optional<std::size_t> owner = slots_[units_[next[i]].slot].owner;
    if (owner.has_value() && *owner != next[i]) {
      // Never evict what is in use or will be needed sooner.
      const bool sooner = std::find(next.begin(), next.begin() + static_cast<std::ptrdiff_t>(i),
                                    *owner) != next.begin() + static_cast<std::ptrdiff_t>(i);
      if (*owner == unit || units_[*owner].acquired() || sooner) break;
    }
    try {
      start_load(next[i]);
      ++begun;
    } catch (const Error&) {
      break;  // not a fault of the unit that is being acquired; that one's own acquire tells
    }
  }
}

void LayerStreamer::drain() {
  device_->synchronize(copy_stream_.handle());
  std::vector<EventHandle> releases;  // events are never destroyed before us
  {
    const std::lock_guard lock(mutex_);
    for (const Slot& slot : slots_) {
      for (const Use& use : slot.uses) releases.push_back(use.released.handle());
    }
  }
  for (const EventHandle released : releases) {
    try {
      device_->synchronize(released);
    } catch (...) {
      // The compute's own failure: done all the same, and its stream's owner learns of it.
    }
  }
  const std::lock_guard lock(mutex_);
  journal_.harvest();
}

void LayerStreamer::abandon() { new std::shared_ptr<LayerStreamer>(shared_from_this()); }

StreamerStats LayerStreamer::stats() {
  const std::lock_guard lock(mutex_);
  journal_.harvest();
  const JournalSums& sums = journal_.sums();
  StreamerStats result = stats_;
  result.load_ns = sums.load_ns;
  result.hits += sums.hits;
  result.stalls = sums.stalls;
  result.stall_ns = sums.stall_ns;
  return result;
}

EventLog::Batch LayerStreamer::events(std::uint64_t from) {
  const std::lock_guard lock(mutex_);
  journal_.harvest();
  return log_.read(from);
}

void LayerStreamer::log_instant(EventKind kind, std::size_t unit) {
  const std::int64_t now = now_ns();
  log_.add({kind, static_cast<std::uint32_t>(unit), static_cast<std::uint32_t>(units_[unit].slot),
            0, now, now});
}

void LayerStreamer::check_invariants() const {
  const std::lock_guard lock(mutex_);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const std::optional<std::size_t>& owner = slots_[slot].owner;
    if (owner.has_value() && units_.at(*owner).slot != slot) {
      throw Error("a slot belongs to a unit of another slot");
    }
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].acquired() && !holds(unit)) {
      throw Error("an acquired unit has lost its slot");
    }
  }
  const JournalSums& sums = journal_.sums();
  if (stats_.hits + sums.hits + sums.stalls > stats_.acquires)
    throw Error("the counters do not add up");
  log_.check_invariants();
}

}  // namespace trae_mem
