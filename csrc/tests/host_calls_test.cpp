// Host code over a driver that calls it when the test says so: when it is destroyed, and what it
// keeps alive.
#include "core/host_calls.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "core/cuda_context.h"
#include "core/error.h"
#include "fake_driver.h"

namespace trae_mem::test {
namespace {

class HostCallsTest : public ::testing::Test {
 protected:
  void SetUp() override { fake = {}; }
  void TearDown() override { EXPECT_EQ(fake.retained, 0) << "a context was not given back"; }

  static std::shared_ptr<CudaContext> open() {
    return std::make_shared<CudaContext>(std::make_shared<const CudaDriver>(fake_functions()), 0);
  }
};

TEST_F(HostCallsTest, HostWorkIsDestroyedAsSoonAsItHasRun) {
  const auto calls = std::make_shared<HostCalls>(open());
  auto ran = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = ran;
  const auto done = calls->run(nullptr, [ran] { ++*ran; });
  ran.reset();
  EXPECT_FALSE(watched.expired());
  EXPECT_FALSE(done->finished());
  ASSERT_EQ(fake.host_functions.size(), 1U);
  const auto [function, data] = fake.host_functions.front();
  function(data);
  EXPECT_TRUE(done->finished());
  EXPECT_TRUE(watched.expired());
}

TEST_F(HostCallsTest, HostWorkThatTheDriverRefusesIsDestroyed) {
  const auto calls = std::make_shared<HostCalls>(open());
  auto work = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = work;
  fake.results["cuLaunchHostFunc"] = cuda::kUnknown;
  EXPECT_THROW(calls->run(nullptr, [work = std::move(work)] { ++*work; }), DeviceError);
  EXPECT_TRUE(watched.expired());
}

TEST_F(HostCallsTest, HostWorkThatWillNeverRunGoesWhenItIsAbandoned) {
  const auto calls = std::make_shared<HostCalls>(open());
  auto work = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = work;
  calls->launch(nullptr, [work = std::move(work)] { ++*work; }, "run");
  EXPECT_FALSE(watched.expired());
  calls->abandon();
  EXPECT_TRUE(watched.expired());
}

// A call to the driver in host work may deadlock: also one that a destructor makes.
TEST_F(HostCallsTest, HostWorkThatEndsLastCallsNoDriver) {
  auto calls = std::make_shared<HostCalls>(open());
  calls->launch(nullptr, [] {}, "run");
  calls.reset();
  EXPECT_EQ(fake.retained, 0);  // the context did not wait for it
  fake.calls.clear();
  const auto [function, data] = fake.host_functions.front();
  function(data);
  EXPECT_TRUE(fake.calls.empty());
}

}  // namespace
}  // namespace trae_mem::test
