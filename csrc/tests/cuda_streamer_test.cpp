// The streamer on the simulated GPU: what its hot path calls, and what happens when any call of the
// driver fails once. Which bytes compute sees is the matter of the layer_streamer_*_test files,
// which run on a GPU too.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/layer_streamer.h"
#include "core/page_pool.h"
#include "gpu_fixture.h"
#include "scripted_store.h"

namespace trae_mem::test {
namespace {

constexpr std::size_t kUnits = 6;
constexpr std::size_t kUnitBytes = 150'000;

class CudaStreamerTest : public GpuTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    TRAE_MEM_REQUIRE_SIMULATOR();
    GpuTest::SetUp();
  }
  static std::shared_ptr<ScriptedStore> make_store() {
    return std::make_shared<ScriptedStore>(std::vector<std::size_t>(kUnits, kUnitBytes),
                                           /*from_memory=*/GetParam());
  }
  static LayerStreamerOptions options() { return {.slots = 3, .prefetch = 1}; }

  // Forth and back once; `use` gets each unit with its direction.
  static void micro_step(const std::function<void(std::size_t, Travel)>& use) {
    for (std::size_t unit = 0; unit < kUnits; ++unit) use(unit, Travel::kForward);
    for (std::size_t unit = kUnits; unit-- > 0;) use(unit, Travel::kBackward);
  }
};

std::string store_name(const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "from_memory" : "from_source";
}
INSTANTIATE_TEST_SUITE_P(Store, CudaStreamerTest, ::testing::Values(true, false), store_name);

TEST_P(CudaStreamerTest, AStepMakesNoCallThatWaitsForTheGpu) {
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  const auto store = make_store();
  const auto pool = std::make_shared<PagePool>(device_);
  LayerStreamer streamer(pool, store, options());
  const Stream compute(*device_);
  const auto use = [&](std::size_t unit, Travel travel) {
    streamer.acquire(unit, compute.handle(), travel);
    streamer.release(unit, compute.handle());
  };
  {
    // A step while nothing is done makes as many events as any step needs. (Acquires of units from
    // a source would wait for their reads.)
    Gate gate;
    if (GetParam()) device_->run(gate.task(), compute.handle());
    micro_step(use);
  }
  streamer.drain();
  ASSERT_TRUE(eventually([&] {
    const StreamerStats stats = streamer.stats();
    return stats.hits + stats.stalls == stats.acquires;
  }));
  gpu.reset_calls();
  micro_step(use);
  EXPECT_EQ(gpu.blocking_calls(), 0U);
  EXPECT_GT(gpu.calls("cuMemcpyHtoDAsync"), 0U);
  EXPECT_EQ(gpu.calls("cuMemMap") + gpu.calls("cuMemCreate"), 0U);
  EXPECT_EQ(GetParam() ? gpu.calls("cuEventCreate") : 0, 0U);
  streamer.drain();
  streamer.check_invariants();
}

// What a hit costs is what a re-acquire of a loaded unit costs.
TEST_P(CudaStreamerTest, AHitIsNotMeasured) {
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  const auto store = make_store();
  LayerStreamer streamer(std::make_shared<PagePool>(device_), store, options());
  const Stream compute(*device_);
  const auto use = [&] {
    streamer.acquire(0, compute.handle(), Travel::kBackward);
    streamer.release(0, compute.handle());
  };
  use();
  streamer.drain();
  ASSERT_TRUE(eventually([&] {
    const StreamerStats stats = streamer.stats();
    return stats.hits + stats.stalls == 1;
  }));
  gpu.reset_calls();
  use();
  EXPECT_EQ(gpu.calls("cuEventRecord"), 1U);  // the release's
  EXPECT_EQ(gpu.calls("cuStreamWaitEvent"), 1U);
  EXPECT_EQ(gpu.calls("cuLaunchHostFunc"), 0U);
}

// A scenario in which whoever meets the one failure says what it was and tries again. The steps see
// their bytes all the same, and nothing is left when all is gone.
class OneFailure {
 public:
  OneFailure(std::string function, std::uint64_t nth, int code)
      : function_(std::move(function)), nth_(nth), code_(code) {}

  void plan() const {
    if (nth_ > 0) GpuUnderTest::instance().fail(function_, nth_, code_);
  }
  void insist(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      ++failures_;
      EXPECT_NE(std::string(error.what()).find(function_), std::string::npos) << error.what();
      action();
    }
  }
  [[nodiscard]] int failures() const { return failures_; }

 private:
  std::string function_;
  std::uint64_t nth_;  // 0: never
  int code_;
  int failures_ = 0;
};

// `setup`: the failure may meet the making of everything; else only the steps and the end.
void run_scenario(OneFailure& failure, bool from_memory, bool setup) {
  if (setup) failure.plan();
  std::shared_ptr<CudaDevice> device;
  failure.insist(
      [&] { device = std::make_shared<CudaDevice>(CudaDeviceOptions{.staging_bytes = 65'536}); });
  const auto store =
      std::make_shared<ScriptedStore>(std::vector<std::size_t>(kUnits, kUnitBytes), from_memory);
  const auto pool = std::make_shared<PagePool>(device);
  std::shared_ptr<LayerStreamer> streamer;
  std::unique_ptr<Stream> compute;
  std::unique_ptr<HostBuffer> seen;
  failure.insist([&] { compute = std::make_unique<Stream>(*device); });
  failure.insist([&] { seen = device->allocate_host(kUnitBytes); });
  failure.insist([&] {
    streamer = std::make_shared<LayerStreamer>(
        pool, store,
        LayerStreamerOptions{3, 1, {true, false, false, false, false, false}, false, 1000});
  });
  if (!setup) failure.plan();
  const auto use = [&](std::size_t unit, Travel travel) {
    failure.insist([&] { streamer->acquire(unit, compute->handle(), travel); });
    failure.insist([&] {
      device->copy_to_host(seen->data(), streamer->window(unit), kUnitBytes, compute->handle());
    });
    failure.insist([&] { streamer->release(unit, compute->handle()); });
    failure.insist([&] { device->synchronize(compute->handle()); });
    const auto* words = reinterpret_cast<const std::uint64_t*>(seen->data());
    EXPECT_EQ(words[0], unit_word(unit, 0, 0));
    EXPECT_EQ(words[kUnitBytes / 8 - 1], unit_word(unit, 0, kUnitBytes / 8 - 1));
    streamer->check_invariants();
  };
  for (int step = 0; step < 2; ++step) {
    for (std::size_t unit = 0; unit < kUnits; ++unit) use(unit, Travel::kForward);
    for (std::size_t unit = kUnits; unit-- > 0;) use(unit, Travel::kBackward);
  }
  failure.insist([&] { streamer->drain(); });
  device->check_invariants();
}

constexpr std::array<const char*, 35> kFunctions = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuMemGetInfo",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuLaunchHostFunc",
};

TEST_P(CudaStreamerTest, AnyCallOfTheDriverMayFailOnce) {
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  device_.reset();
  for (const bool setup : {true, false}) {
    OneFailure none("", 0, 0);
    gpu.reset_calls();
    run_scenario(none, GetParam(), setup);
    EXPECT_EQ(none.failures(), 0);
    std::map<std::string, std::uint64_t> calls;
    for (const char* function : kFunctions) calls[function] = gpu.calls(function);
    for (const auto& [function, count] : calls) {
      const std::uint64_t stride = std::max<std::uint64_t>(1, count / 12);
      for (std::uint64_t nth = 1; nth <= count; nth += stride) {
        SCOPED_TRACE(function + " " + std::to_string(nth) + " of " + std::to_string(count) +
                     (setup ? "" : " behind the set-up"));
        OneFailure failure(function, nth, cuda::kUnknown);
        run_scenario(failure, GetParam(), setup);
        EXPECT_LE(failure.failures(), 1);
        gpu.clear_faults();
        clean_.expect_clean();
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace trae_mem::test
