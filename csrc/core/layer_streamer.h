// Moves units between their store and the device, in time and in order.
//
// Each unit has a window at fixed addresses (layer_window.h). Streamed units share K slots, the
// j-th of them slot j mod K; resident units have a slot each. A load is one copy into the
// window on the streamer's own stream, between two events:
//
//   slot.released --wait--> [copy stream: load] --unit.loaded--> [compute stream: unit runs]
//
// `acquire` makes the compute stream wait for `loaded`; `release` records `released` behind the
// unit's work, and the next load into that slot waits for it. The host waits for neither where
// the device has streams of its own, but for what must be read from files [Note: reads and waits].
//
// [Note: several streams] A unit may be acquired on several streams, each of which waits for its
// load and releases it for itself. It is acquired while one of them has not released it, and its
// slot is overwritten behind the last release of every stream. A stream that acquires a unit twice
// releases it once.
//
// [Note: stalls] An acquire whose load is done is a hit, at once and at no cost. For others the
// waiting stream's own time is measured (load_journal.h), not the host's, which runs ahead of a
// GPU: a load that was done when the stream got there is a hit too, counted when that is known.
//
// [Note: looking ahead] An acquire begins the loads of the next units that are not on the device
// yet, `prefetch` of them at most, as far ahead as the slots reach: K - 1 units. The farthest goes
// into the slot that was released last and waits, by its event, for that unit's work to end. So
// the link is busy from the second unit on after a turn-around, and every slot is used.
//
// [Note: turn-around] A released unit keeps its slot until another load needs it. When the
// direction of travel turns (forward -> backward -> next forward) the K units behind us are
// still there and are used without a load, hence 2 * (streamed - K) loads a micro-step. That
// is also why prefetching stops at the last unit unless told to wrap around.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device.h"
#include "event_log.h"
#include "event_pool.h"
#include "layer_window.h"
#include "load_journal.h"
#include "page_pool.h"
#include "weight_store.h"

namespace trae_mem {

struct LayerStreamerOptions {
  std::size_t slots = 4;       // K, shared by the streamed units
  std::size_t prefetch = 2;    // most loads that an acquire begins ahead; <= slots - 2
  std::vector<bool> resident;  // one a unit; empty: none
  bool poison = false;         // fill a slot with NaN as soon as it is released
  std::size_t event_log_entries = 65536;
};

// Where the next acquires are expected.
enum class Travel : std::uint8_t {
  kForward,        // up to the last unit, then back
  kForwardAround,  // up to the last unit, then from the first again (inference)
  kBackward,       // down to the first unit, then forth
};

struct StreamerStats {
  std::uint64_t acquires = 0;
  std::uint64_t loads = 0;
  std::uint64_t load_bytes = 0;
  std::int64_t load_ns = 0;   // the copies' own time, one behind the other
  std::uint64_t hits = 0;     // acquires that found their unit loaded
  std::uint64_t stalls = 0;   // acquires that had to wait; some may still be undecided
  std::int64_t stall_ns = 0;  // time that the streams of acquires waited
};

// Thread-safe; acquire waits outside of the lock.
class LayerStreamer : public std::enable_shared_from_this<LayerStreamer> {
 public:
  // Throws OutOfMemory when the pool has no room for the slots, InvalidArgument for options
  // that do not fit each other and for a unit of 0 bytes, and what the device throws.
  LayerStreamer(std::shared_ptr<PagePool> pool, std::shared_ptr<WeightStore> store,
                LayerStreamerOptions options);
  ~LayerStreamer();
  LayerStreamer(const LayerStreamer&) = delete;
  LayerStreamer& operator=(const LayerStreamer&) = delete;

  [[nodiscard]] std::size_t units() const noexcept { return units_.size(); }
  [[nodiscard]] Address window(std::size_t unit) const;

  // `stream` may use the unit's window until the release. Throws what its load threw, as far as
  // that is known by then; the unit is then not acquired by `stream`. After a failed load the next
  // acquire loads again, once nobody has the unit acquired.
  void acquire(std::size_t unit, StreamHandle stream, Travel travel);
  // As for `stream`, the slot may be overwritten behind the work that is queued in it now. A unit
  // that `stream` has not acquired is left alone, so that an interrupted caller may always release.
  void release(std::size_t unit, StreamHandle stream);
  // The unit's bytes in the store changed: load it again before its next use.
  void invalidate(std::size_t unit);
  // Waits until nothing is in flight: neither loads nor work in front of a release.
  void drain();
  // For a forked child, which lacks our threads: never destroy this object and what it holds,
  // since destroying would join them.
  void abandon();

  [[nodiscard]] StreamerStats stats();
  // What happened, from the entry numbered `from` on; see EventLog::read.
  [[nodiscard]] EventLog::Batch events(std::uint64_t from);
  [[nodiscard]] const Device& device() const noexcept { return *device_; }
  [[nodiscard]] std::size_t bytes_on_device() const noexcept { return bytes_on_device_; }
  void check_invariants() const;

 private:
  struct Unit {
    std::size_t slot;
    std::optional<std::size_t> streamed_rank;  // its place among the streamed units
    std::unique_ptr<LayerWindow> window;
    std::vector<StreamHandle> users;  // that have acquired it and not released it
    [[nodiscard]] bool acquired() const noexcept { return !users.empty(); }
  };
  struct Use {
    StreamHandle stream;
    Event released;        // recorded behind the stream's last use of the slot
    bool pending = false;  // the copy stream does not wait for it yet
  };
  struct Slot {
    std::optional<std::size_t> owner;  // the unit that was loaded into it last
    bool fresh = false;                // it holds the owner's bytes, or will after its load
    std::shared_ptr<Load> load;        // the owner's
    std::vector<Use> uses;             // one a stream
  };

  void place_units(PagePool& pool);
  // With mutex_ held, as all below.
  void start_load(std::size_t unit);
  void prefetch(std::size_t unit, Travel travel);
  // The streamed units behind `unit` in the direction of travel that the slots could hold.
  [[nodiscard]] std::vector<std::size_t> upcoming(std::size_t unit, Travel travel) const;
  // The slot's bytes are no longer its owner's, from `when` on in the copy stream; null: from now.
  void drop(Slot& slot, std::shared_ptr<const EventPool::Lease> when = nullptr);
  // The copy stream waits for every use of the slot.
  void wait_for_uses(Slot& slot);
  Use& use_of(Slot& slot, StreamHandle stream);
  void forget_user(std::size_t unit, StreamHandle stream);
  // Makes `stream` wait for the load; measures that where it can. Without mutex_.
  void wait_for_load(StreamHandle stream, const std::shared_ptr<Load>& load, bool measured);
  [[nodiscard]] bool holds(std::size_t unit) const;
  void log_instant(EventKind kind, std::size_t unit);

  std::shared_ptr<PagePool> pool_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<WeightStore> store_;
  const LayerStreamerOptions options_;
  EventLog log_;
  EventPool timed_events_;
  Stream copy_stream_;
  std::vector<std::unique_ptr<SlotArena>> arenas_;  // before units_: windows alias their pages
  std::vector<std::size_t> streamed_;               // unit of each streamed rank
  std::size_t bytes_on_device_ = 0;                 // slots and resident units
  mutable std::mutex mutex_;                        // guards all below
  std::vector<Slot> slots_;
  std::vector<Unit> units_;
  StreamerStats stats_;  // what is known when it is queued; the rest is the journal's
  LoadJournal journal_;
};

}  // namespace trae_mem
