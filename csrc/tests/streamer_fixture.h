// A store whose bytes, failures and timing the test decides, and a small "model": units whose
// compute checks, byte for byte, that its window holds what it must.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "core/host_device.h"
#include "core/layer_streamer.h"
#include "core/page_pool.h"
#include "core/weight_store.h"
#include "test_support.h"

namespace trae_mem::test {

// The 64-bit word at `index` of a unit; each version of a unit differs in every word.
inline std::uint64_t unit_word(std::size_t unit, std::size_t version, std::size_t index) {
  return (unit + 1) * 0x9E3779B97F4A7C15U + version * 0xC2B2AE3D27D4EB4FU + index;
}

// Units' sizes are multiples of 8.
class ScriptedStore final : public WeightStore {
 public:
  using Hook = std::function<void(std::size_t unit)>;

  explicit ScriptedStore(std::vector<std::size_t> unit_bytes)
      : unit_bytes_(std::move(unit_bytes)), versions_(unit_bytes_.size(), 0) {}

  [[nodiscard]] const char* name() const noexcept override { return "scripted"; }
  [[nodiscard]] std::size_t units() const noexcept override { return unit_bytes_.size(); }
  [[nodiscard]] std::size_t unit_bytes(std::size_t unit) const override {
    return unit_bytes_.at(unit);
  }
  void load(std::size_t unit, Address window, Device& device, StreamHandle stream) override {
    requested_.push_back(unit);
    device.copy_to_device(window, std::make_shared<Source>(*this, unit, versions_.at(unit)),
                          unit_bytes(unit), stream);
  }

  // Runs on the copy stream before a unit's bytes are written; may block, and may throw to make
  // the load fail.
  void before_loads(Hook hook) {
    const std::lock_guard lock(mutex_);
    hook_ = std::move(hook);
  }
  // From the next load on the unit has other bytes.
  void change(std::size_t unit) { ++versions_.at(unit); }
  [[nodiscard]] std::size_t version(std::size_t unit) const { return versions_.at(unit); }
  // The units whose loads were begun, in that order.
  [[nodiscard]] const std::vector<std::size_t>& requested() const { return requested_; }
  void forget_requests() { requested_.clear(); }
  // True once the unit's bytes are being written, or a hook holds them.
  [[nodiscard]] bool reached(std::size_t unit) const {
    const std::lock_guard lock(mutex_);
    return std::find(reached_.begin(), reached_.end(), unit) != reached_.end();
  }
  void forget_reached() {
    const std::lock_guard lock(mutex_);
    reached_.clear();
  }

 private:
  class Source final : public ByteSource {
   public:
    Source(ScriptedStore& store, std::size_t unit, std::size_t version)
        : store_(store), unit_(unit), version_(version) {}
    void read(std::size_t offset, std::span<std::byte> out) const override {
      if (offset == 0) store_.reach(unit_);
      for (std::size_t i = 0; i < out.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = unit_word(unit_, version_, (offset + i) / sizeof(std::uint64_t));
        std::memcpy(out.data() + i, &word, sizeof(word));
      }
    }

   private:
    ScriptedStore& store_;
    std::size_t unit_;
    std::size_t version_;
  };

  void reach(std::size_t unit) {
    Hook hook;
    {
      const std::lock_guard lock(mutex_);
      reached_.push_back(unit);
      hook = hook_;
    }
    if (hook) hook(unit);
  }

  std::vector<std::size_t> unit_bytes_;
  std::vector<std::size_t> versions_;
  std::vector<std::size_t> requested_;
  mutable std::mutex mutex_;  // guards all below; the copy stream takes it
  Hook hook_;
  std::vector<std::size_t> reached_;
};

struct StreamerSetup {
  std::vector<std::size_t> unit_bytes;
  std::size_t slots = 4;
  std::size_t prefetch = 2;
  std::vector<bool> resident = {};
  bool poison = false;
  std::string faults = {};
  std::uint64_t random_delay_us = 0;
  std::uint64_t seed = 0;
  std::size_t limit_bytes = 0;  // of the pool
};

inline std::vector<std::size_t> equal_units(std::size_t count, std::size_t bytes = 4096) {
  std::vector<std::size_t> result(count, bytes);
  return result;
}

inline std::vector<bool> resident_units(std::size_t count, const std::vector<std::size_t>& units) {
  std::vector<bool> result(count, false);
  for (const std::size_t unit : units) result[unit] = true;
  return result;
}

class StreamerTest : public ::testing::Test {
 protected:
  void make(const StreamerSetup& setup) {
    discard();
    device_ =
        std::make_shared<HostDevice>(HostDeviceOptions{.memory_bytes = 64 * kPageBytes,
                                                       .faults = setup.faults,
                                                       .random_delay_us = setup.random_delay_us,
                                                       .seed = setup.seed});
    pool_ = std::make_shared<PagePool>(device_, setup.limit_bytes);
    store_ = std::make_shared<ScriptedStore>(setup.unit_bytes);
    compute_.emplace(*device_);
    streamer_ = std::make_shared<LayerStreamer>(
        pool_, store_,
        LayerStreamerOptions{setup.slots, setup.prefetch, setup.resident, setup.poison, 65536});
  }

  // Ends everything in its order; no invariant may be broken, no page lost.
  void discard() {
    if (streamer_ != nullptr) {
      finish_compute();  // a test that failed midway may have left units acquired
      EXPECT_NO_THROW(streamer_->check_invariants());
    }
    streamer_.reset();
    compute_.reset();
    if (pool_ != nullptr) {
      EXPECT_NO_THROW(pool_->check_invariants());
      EXPECT_EQ(pool_->used_bytes(), 0U);
    }
    pool_.reset();
    if (device_ != nullptr) {
      EXPECT_NO_THROW(device_->check_invariants());
      EXPECT_EQ(device_->info().used_bytes, 0U);
    }
    store_.reset();
    device_.reset();
  }
  void TearDown() override {
    discard();
    const std::lock_guard lock(mistakes_mutex_);
    for (const std::string& mistake : mistakes_) ADD_FAILURE() << mistake;
  }

  // The compute stream: one of its own, as on a GPU, so that acquire does not block the host.
  [[nodiscard]] StreamHandle compute() const { return compute_->handle(); }
  void finish_compute() { device_->synchronize(compute()); }

  // Queues compute that reads the whole window.
  void run_unit(std::size_t unit, StreamHandle stream) {
    device_->run(
        [this, unit, version = store_->version(unit), window = streamer_->window(unit),
         bytes = store_->unit_bytes(unit)] {
          const auto* words = reinterpret_cast<const std::uint64_t*>(window);
          for (std::size_t i = 0; i < bytes / sizeof(std::uint64_t); ++i) {
            if (words[i] == unit_word(unit, version, i)) continue;
            const std::lock_guard lock(mistakes_mutex_);
            mistakes_.push_back("unit " + std::to_string(unit) + " computed with wrong bytes at " +
                                std::to_string(i * sizeof(std::uint64_t)));
            break;
          }
          ++computed_;
        },
        stream);
  }
  void use(std::size_t unit, Travel travel, StreamHandle stream) {
    streamer_->acquire(unit, stream, travel);
    run_unit(unit, stream);
    streamer_->release(unit, stream);
  }
  void use(std::size_t unit, Travel travel = Travel::kForward) { use(unit, travel, compute()); }

  // A micro-step: all units forth and back.
  void train_step(StreamHandle stream) {
    const std::size_t count = store_->units();
    for (std::size_t unit = 0; unit < count; ++unit) use(unit, Travel::kForward, stream);
    for (std::size_t unit = count; unit-- > 0;) use(unit, Travel::kBackward, stream);
  }

  [[nodiscard]] int computed() const { return computed_; }
  [[nodiscard]] std::vector<LogEntry> log() const { return streamer_->log().read(0).entries; }

  std::shared_ptr<HostDevice> device_;
  std::shared_ptr<PagePool> pool_;
  std::shared_ptr<ScriptedStore> store_;
  std::shared_ptr<LayerStreamer> streamer_;

 private:
  std::optional<Stream> compute_;
  std::atomic<int> computed_ = 0;  // units whose compute has run
  std::mutex mistakes_mutex_;
  std::vector<std::string> mistakes_;
};

}  // namespace trae_mem::test
