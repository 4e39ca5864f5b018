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
      copy_stream_(*device_) {
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
    for (std::size_t i = 0; i < shared; ++i)
      slots_.push_back({std::nullopt, false, Event(*device_), kCallerStream});
  }
  std::size_t rank = 0;
  for (std::size_t unit = 0; unit < store_->units(); ++unit) {
    const std::size_t bytes = store_->unit_bytes(unit);
    if (rank < streamed_.size() && streamed_[rank] == unit) {
      const std::size_t slot = rank % shared;
      units_.push_back({slot, rank, arenas_.front()->window(slot, bytes), Event(*device_)});
      ++rank;
    } else {
      arenas_.push_back(std::make_unique<SlotArena>(pool, bytes, 1));
      bytes_on_device_ += arenas_.back()->slot_bytes();
      units_.push_back(
          {slots_.size(), std::nullopt, arenas_.back()->window(0, bytes), Event(*device_)});
      slots_.push_back({std::nullopt, false, Event(*device_), kCallerStream});
    }
  }
}

Address LayerStreamer::window(std::size_t unit) const { return units_.at(unit).window->address(); }

void LayerStreamer::acquire(std::size_t unit, StreamHandle stream, Travel travel) {
  const std::int64_t begin = now_ns();
  bool hit = false;
  EventHandle loaded{};
  {
    const std::lock_guard lock(mutex_);
    Unit& wanted = units_.at(unit);
    if (!holds(unit)) start_load(unit);
    loaded = wanted.loaded.handle();
    hit = device_->query(loaded);
    prefetch(unit, travel);
    wanted.acquired = true;
    ++stats_.acquires;
  }
  try {
    device_->wait(stream, loaded);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    units_[unit].acquired = false;
    drop(slots_[units_[unit].slot]);
    throw;
  }
  const std::int64_t end = now_ns();
  const auto slot = static_cast<std::uint32_t>(units_[unit].slot);
  const auto number = static_cast<std::uint32_t>(unit);
  if (!hit) log_.add({EventKind::kStall, number, slot, 0, begin, end});
  log_.add({EventKind::kAcquire, number, slot, 0, end, end});
  const std::lock_guard lock(mutex_);
  if (hit) {
    ++stats_.hits;
  } else {
    ++stats_.stalls;
    stats_.stall_ns += end - begin;
  }
}

void LayerStreamer::release(std::size_t unit, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  Unit& used = units_.at(unit);
  if (!used.acquired) return;
  Slot& slot = slots_[used.slot];
  // One event stands for all uses: behind another stream's work, then behind this one's.
  if (slot.user != stream) device_->wait(stream, slot.released.handle());
  device_->record(slot.released.handle(), stream);
  slot.user = stream;
  used.acquired = false;
  log_instant(EventKind::kRelease, unit);
  if (options_.poison) {
    device_->wait(copy_stream_.handle(), slot.released.handle());
    drop(slot);
    device_->fill(used.window->address(), kPoison, used.window->bytes(), copy_stream_.handle());
  }
}

void LayerStreamer::invalidate(std::size_t unit) {
  const std::lock_guard lock(mutex_);
  if (units_.at(unit).acquired) throw InvalidArgument("invalidate: the unit is acquired");
  if (holds(unit)) drop(slots_[units_[unit].slot]);
}

bool LayerStreamer::holds(std::size_t unit) const {
  const Slot& slot = slots_[units_[unit].slot];
  return slot.fresh && slot.owner == unit;
}

void LayerStreamer::drop(Slot& slot) {
  if (!slot.fresh) return;
  slot.fresh = false;
  // In the copy stream, so that the eviction is logged behind a load that is still in flight.
  device_->run([this, unit = *slot.owner] { log_instant(EventKind::kEvict, unit); },
               copy_stream_.handle());
}

void LayerStreamer::start_load(std::size_t unit) {
  Unit& target = units_[unit];
  Slot& slot = slots_[target.slot];
  const StreamHandle copies = copy_stream_.handle();
  if (slot.owner.has_value() && units_[*slot.owner].acquired) {
    throw InvalidArgument("acquire: unit " + std::to_string(unit) + " needs the slot of unit " +
                          std::to_string(*slot.owner) + ", which is still acquired");
  }
  device_->wait(copies, slot.released.handle());
  drop(slot);
  if (slot.owner.has_value() && *slot.owner != unit) {
    const LayerWindow& previous = *units_[*slot.owner].window;
    device_->rest(previous.address(), previous.bytes(), copies);
  }
  slot.owner = unit;
  // The two run on the copy stream, one behind the other, so they may share the begin.
  auto begin = std::make_shared<std::int64_t>(0);
  device_->run([begin] { *begin = now_ns(); }, copies);
  store_->load(unit, target.window->address(), *device_, copies);
  device_->prepare(target.window->address(), target.window->bytes(), copies);
  device_->run(
      [this, begin, unit, slot = target.slot, bytes = target.window->bytes()] {
        const std::int64_t end = now_ns();
        log_.add({EventKind::kLoad, static_cast<std::uint32_t>(unit),
                  static_cast<std::uint32_t>(slot), bytes, *begin, end});
        const std::lock_guard lock(load_mutex_);
        load_ns_ += end - *begin;
      },
      copies);
  device_->record(target.loaded.handle(), copies);
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
      if (*owner == unit || units_[*owner].acquired || sooner) break;
    }
    try {
      start_load(next[i]);
      ++begun;
    } catch (const DeviceError&) {
      break;  // not a fault of the unit that is being acquired; that one's own acquire tells
    }
  }
}

void LayerStreamer::drain() {
  device_->synchronize(copy_stream_.handle());
  for (const Slot& slot : slots_) {
    try {
      device_->synchronize(slot.released.handle());
    } catch (...) {
      // The compute's own failure: done all the same, and its stream's owner learns of it.
    }
  }
}

void LayerStreamer::abandon() { new std::shared_ptr<LayerStreamer>(shared_from_this()); }

StreamerStats LayerStreamer::stats() const {
  StreamerStats result;
  {
    const std::lock_guard lock(mutex_);
    result = stats_;
  }
  const std::lock_guard lock(load_mutex_);
  result.load_ns = load_ns_;
  return result;
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
    if (units_[unit].acquired && !holds(unit)) {
      throw Error("an acquired unit has lost its slot");
    }
  }
  if (stats_.hits + stats_.stalls > stats_.acquires) throw Error("the counters do not add up");
  log_.check_invariants();
}

}  // namespace trae_mem
