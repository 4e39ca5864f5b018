// A small "model" for the tests of the streamer: units whose compute checks, byte for byte, that
// its window holds what it must. It runs on a HostDevice and on the GPU under test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_device.h"
#include "core/device.h"
#include "core/error.h"
#include "core/host_device.h"
#include "core/layer_streamer.h"
#include "core/page_pool.h"
#include "gpu_under_test.h"
#include "scripted_store.h"
#include "test_support.h"

namespace trae_mem::test {

// What a test of the streamer runs on.
struct StreamerDevice {
  std::string name;
  bool on_gpu = false;
  bool from_memory = false;  // the store's bytes; else they come from a source
};

inline void PrintTo(const StreamerDevice& device, std::ostream* out) { *out << device.name; }

inline const StreamerDevice kHost{"host"};
// Loads from memory never block an acquire; those from sources do [Note: reads and waits].
inline const StreamerDevice kGpu{"gpu", true, true};
inline const StreamerDevice kGpuFromSource{"gpu_from_source", true, false};

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
  // What the test runs on; decided before the first `make`.
  void choose(const StreamerDevice& device) {
    kind_ = device;
    if (device.on_gpu) TRAE_MEM_REQUIRE_GPU();
  }
  [[nodiscard]] bool on_gpu() const { return kind_.on_gpu; }

  void make_device(const StreamerSetup& setup) {
    constexpr std::size_t kMemory = 64 * kPageBytes;
    if (on_gpu()) {
      GpuUnderTest::instance().set_adversary(setup.seed, setup.random_delay_us, setup.poison);
      // Many chunks a unit.
      device_ = std::make_shared<CudaDevice>(
          CudaDeviceOptions{.memory_bytes = kMemory, .staging_bytes = 32'768});
    } else {
      device_ = std::make_shared<HostDevice>(
          HostDeviceOptions{kMemory, 0, setup.faults, setup.random_delay_us, setup.seed});
    }
  }

  void make(const StreamerSetup& setup) {
    discard();
    make_device(setup);
    pool_ = std::make_shared<PagePool>(device_, setup.limit_bytes);
    store_ = std::make_shared<ScriptedStore>(setup.unit_bytes, kind_.from_memory);
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
      EXPECT_NO_THROW(check_device());
      EXPECT_EQ(device_->info().used_bytes, 0U);
    }
    checked_.clear();
    store_.reset();
    device_.reset();
  }
  void check_device() const {
    if (on_gpu()) {
      dynamic_cast<const CudaDevice&>(*device_).check_invariants();
    } else {
      dynamic_cast<const HostDevice&>(*device_).check_invariants();
    }
  }
  void TearDown() override {
    discard();
    if (on_gpu()) clean_.expect_clean();
    const std::lock_guard lock(mistakes_mutex_);
    for (const std::string& mistake : mistakes_) ADD_FAILURE() << mistake;
  }

  // The compute stream: one of its own, as on a GPU, so that acquire does not block the host.
  [[nodiscard]] StreamHandle compute() const { return compute_->handle(); }
  void finish_compute() {
    device_->synchronize(compute());
    device_->synchronize(kCallerStream);
  }

  // Queues compute that reads the whole window.
  void run_unit(std::size_t unit, StreamHandle stream) {
    const std::size_t bytes = store_->unit_bytes(unit);
    const Address window = streamer_->window(unit);
    const void* place = reinterpret_cast<const void*>(window);
    std::shared_ptr<HostBuffer> copy;
    if (on_gpu()) {
      copy = checked_.take(*device_, bytes);
      device_->copy_to_host(copy->data(), window, bytes, stream);
      place = copy->data();
    }
    device_->run(
        [this, unit, version = store_->version(unit), place, bytes, copy] {
          const auto* words = static_cast<const std::uint64_t*>(place);
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
  [[nodiscard]] std::vector<LogEntry> log() const { return streamer_->events(0).entries; }
  // How many units have computed, once all have.
  int finished() {
    finish_compute();
    return computed();
  }
  // What the unit's window holds; not in the order of any other stream.
  [[nodiscard]] std::vector<std::byte> window_bytes(std::size_t unit) {
    const std::size_t bytes = store_->unit_bytes(unit);
    const Stream stream(*device_);
    const std::shared_ptr<HostBuffer> copy = checked_.take(*device_, bytes);
    device_->copy_to_host(copy->data(), streamer_->window(unit), bytes, stream.handle());
    device_->synchronize(stream.handle());
    return {copy->data(), copy->data() + bytes};
  }

  std::shared_ptr<Device> device_;
  std::shared_ptr<PagePool> pool_;
  std::shared_ptr<ScriptedStore> store_;
  std::shared_ptr<LayerStreamer> streamer_;

 private:
  // Pinned memory that compute copies windows into. Host work gives it back, and must not call the
  // driver: so buffers are kept, and destroyed with the device.
  class CheckedBuffers {
   public:
    std::shared_ptr<HostBuffer> take(Device& device, std::size_t bytes) {
      std::unique_ptr<HostBuffer> buffer;
      {
        const std::lock_guard lock(mutex_);
        const auto fits = [bytes](const auto& free) { return free->bytes() >= bytes; };
        const auto found = std::find_if(free_.begin(), free_.end(), fits);
        if (found != free_.end()) {
          buffer = std::move(*found);
          free_.erase(found);
        }
      }
      if (buffer == nullptr) buffer = device.allocate_host(bytes);
      return {buffer.release(), [this](HostBuffer* used) {
                const std::lock_guard lock(mutex_);
                free_.emplace_back(used);
              }};
    }
    void clear() { free_.clear(); }

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<HostBuffer>> free_;
  };

  StreamerDevice kind_ = kHost;
  const CleanGpu clean_;
  std::optional<Stream> compute_;
  CheckedBuffers checked_;
  std::atomic<int> computed_ = 0;  // units whose compute has run
  std::mutex mistakes_mutex_;
  std::vector<std::string> mistakes_;
};

// For suites that run on several devices: their tests are TEST_P of the device.
class StreamerDeviceTest : public StreamerTest,
                           public ::testing::WithParamInterface<StreamerDevice> {
 protected:
  void SetUp() override { choose(GetParam()); }
};

inline std::string device_name(const ::testing::TestParamInfo<StreamerDevice>& info) {
  return info.param.name;
}

}  // namespace trae_mem::test
