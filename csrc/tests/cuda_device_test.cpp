// What is particular to CudaDevice: the shared context, raw streams, times, lost contexts, forks.
// For host memory and waits for reads see cuda_copy_test.cpp.
#include "core/cuda_device.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "core/address_range.h"
#include "core/clock.h"
#include "core/error.h"
#include "gpu_fixture.h"

namespace trae_mem::test {
namespace {

class CudaDeviceTest : public GpuTest {};

// --- the context and the memory -----------------------------------------------------------------

TEST_F(CudaDeviceTest, ItTellsTheGpusNameAndMemoryOrTheLimitSetForIt) {
  const DeviceInfo whole = CudaDevice({}).info();
  EXPECT_FALSE(whole.name.empty());
  EXPECT_EQ(whole.index, 0);
  EXPECT_GT(whole.free_bytes, 0U);
  EXPECT_LE(whole.free_bytes, whole.total_bytes);
  const CudaDevice limited({.memory_bytes = 3 * kPageBytes + 5});
  EXPECT_EQ(limited.info().total_bytes, 3 * kPageBytes);
  EXPECT_EQ(limited.info().free_bytes, 3 * kPageBytes);
  EXPECT_THROW(CudaDevice({.memory_bytes = kPageBytes - 1}), InvalidArgument);
  EXPECT_THROW(CudaDevice({.index = 99}), DeviceUnavailable);
}

TEST_F(CudaDeviceTest, EveryCallLeavesTheThreadsContextAsItWas) {
  const auto driver = CudaDriver::load();
  const auto current = [&driver] {
    cuda::ContextHandle context = nullptr;
    EXPECT_EQ(driver->cuCtxGetCurrent(&context), cuda::kSuccess);
    return context;
  };
  std::thread([&] {  // a thread that has no context
    EXPECT_EQ(current(), nullptr);
    use_everything();
    EXPECT_EQ(current(), nullptr);
  })
      .join();
  std::vector<int> others = {0};
  if (GpuUnderTest::instance().count() > 1) others.push_back(1);
  for (const int other : others) {
    cuda::ContextHandle context = nullptr;
    ASSERT_EQ(driver->cuDevicePrimaryCtxRetain(&context, other), cuda::kSuccess);
    ASSERT_EQ(driver->cuCtxPushCurrent(context), cuda::kSuccess);
    use_everything();
    EXPECT_EQ(current(), context);
    EXPECT_EQ(driver->cuCtxPopCurrent(&context), cuda::kSuccess);
    EXPECT_EQ(driver->cuDevicePrimaryCtxRelease(other), cuda::kSuccess);
  }
}

TEST_F(CudaDeviceTest, AStreamOfSomebodyElseIsUsedAsItIs) {
  const auto driver = CudaDriver::load();
  const auto context = std::make_shared<const CudaContext>(driver, 0);
  const CudaContext::Guard guard(*context);
  const CudaStream foreign(context);
  const StreamHandle theirs{reinterpret_cast<std::uintptr_t>(foreign.pointer())};
  for (const StreamHandle stream : {theirs, kCallerStream}) {
    const Window window(device_);
    const auto bytes = test_bytes(kPageBytes, 1);
    Gate gate;
    const Stream copies(*device_);
    const Event loaded(*device_);
    const auto pinned = pinned_copy(bytes);
    device_->run(gate.task(), copies.handle());
    device_->copy_to_device(window.begin(), pinned->data(), kPageBytes, copies.handle());
    device_->record(loaded.handle(), copies.handle());
    device_->wait(stream, loaded.handle());
    const auto back = device_->allocate_host(kPageBytes);
    device_->copy_to_host(back->data(), window.begin(), kPageBytes, stream);
    std::atomic<bool> ran = false;
    device_->run([&ran] { ran = true; }, stream);
    EXPECT_FALSE(happens([&ran] { return ran.load(); }));
    gate.open();
    ASSERT_EQ(driver->cuStreamSynchronize(reinterpret_cast<cuda::StreamPointer>(stream)),
              cuda::kSuccess);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), back->data()));
    EXPECT_THROW(device_->destroy_stream(stream), InvalidArgument);  // not ours
  }
}

TEST_F(CudaDeviceTest, WhatTheOwnersForgotIsGivenBackWithTheDevice) {
  const Address address = device_->reserve(2 * kPageBytes);
  const PageHandle kept = device_->create(kPageBytes);
  const PageHandle released = device_->create(kPageBytes);
  device_->map(address, kPageBytes, kept);
  device_->map(address + kPageBytes, kPageBytes, released);
  device_->release(released);
  static_cast<void>(device_->create_stream());
  static_cast<void>(device_->create_event(/*timed=*/true));
  // The fixture sees that the simulator counts nothing of ours when the device is gone.
}

TEST_F(CudaDeviceTest, OnlyTimedEventsTellTimes) {
  const Event event(*device_);
  EXPECT_THROW(static_cast<void>(device_->time_ns(event.handle())), InvalidArgument);
}

TEST_F(CudaDeviceTest, TimesHoldWhileReferencesAreReplaced) {
  const auto context = std::make_shared<const CudaContext>(CudaDriver::load(), 0);
  const CudaContext::Guard guard(*context);
  const auto calls = std::make_shared<HostCalls>(context);
  CudaClock clock(context, calls, std::chrono::nanoseconds(0));  // at each question
  const CudaStream stream(context);
  const CudaEvent event(context, /*timed=*/true);
  const CudaDriver& driver = context->driver();
  if (GpuUnderTest::instance().simulated()) GpuUnderTest::instance().reset_calls();
  const std::int64_t before = now_ns();
  ASSERT_EQ(driver.cuEventRecord(event.pointer(), stream.pointer()), cuda::kSuccess);
  ASSERT_EQ(driver.cuEventSynchronize(event.pointer()), cuda::kSuccess);
  const std::int64_t behind = now_ns();
  std::optional<std::int64_t> time;
  int answers = 0;
  ASSERT_TRUE(eventually([&] {
    time = clock.host_ns(event.pointer());
    if (time.has_value()) ++answers;
    const bool simulated = GpuUnderTest::instance().simulated();
    const std::uint64_t references =
        simulated ? GpuUnderTest::instance().calls("cuLaunchHostFunc") : 10;
    return answers > 200 && references >= 10;
  }));
  constexpr std::int64_t kTolerance = 1'000'000;
  EXPECT_GE(*time, before - kTolerance);
  EXPECT_LE(*time, behind + kTolerance);
  clock.synchronize();
}

// --- lost contexts, forks -----------------------------------------------------------------------

constexpr int kIllegalAddress = 700;

bool says_lost(const std::function<void()>& call) {
  return message_of<DeviceError>(call).find("CUDA context is lost") != std::string::npos;
}

TEST_F(CudaDeviceTest, WhenTheContextIsLostEveryCallSaysSoAndNoWaitHangs) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  const Window window(device_);
  const Stream stream(*device_);
  const Event event(*device_);
  Gate gate;
  // The ring is full and held up by the gate, so that most of the source is not read.
  device_->run(gate.task(), stream.handle());
  device_->copy_to_device(window.begin(),
                          std::make_shared<HeldSource>([] {}, test_bytes(300'000, 8)), 300'000,
                          stream.handle());
  device_->record(event.handle(), stream.handle());
  GpuUnderTest::instance().abort_context(kIllegalAddress);
  gate.open();
  EXPECT_TRUE(says_lost([&] { device_->wait(stream.handle(), event.handle()); }));
  EXPECT_TRUE(says_lost([&] { device_->synchronize(event.handle()); }));
  EXPECT_TRUE(says_lost([&] { device_->synchronize(stream.handle()); }));
  EXPECT_TRUE(says_lost([&] { static_cast<void>(device_->query(event.handle())); }));
  EXPECT_TRUE(says_lost([&] { device_->record(event.handle(), stream.handle()); }));
  EXPECT_TRUE(says_lost([&] { device_->run([] {}, stream.handle()); }));
  EXPECT_TRUE(says_lost([&] { static_cast<void>(device_->create(kPageBytes)); }));
  EXPECT_TRUE(says_lost([&] { static_cast<void>(device_->info()); }));
  EXPECT_TRUE(says_lost([&] { static_cast<void>(device_->allocate_host(100)); }));
  GpuUnderTest::instance().clear_faults();  // only a simulated context heals
  GpuUnderTest::instance().clear_reports();
}

TEST_F(CudaDeviceTest, AWaitForReadsEndsWhenTheContextIsLost) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  const Window window(device_);
  const Stream copies(*device_);
  const Stream compute(*device_);
  const Event loaded(*device_);
  Gate gate;
  device_->copy_to_device(window.begin(),
                          std::make_shared<HeldSource>(gate.task(), test_bytes(1000, 9)), 1000,
                          copies.handle());
  device_->record(loaded.handle(), copies.handle());
  std::atomic<bool> waited = false;
  std::thread waiting([&] {
    EXPECT_TRUE(says_lost([&] { device_->wait(compute.handle(), loaded.handle()); }));
    waited = true;
  });
  EXPECT_FALSE(happens([&waited] { return waited.load(); }));
  GpuUnderTest::instance().abort_context(kIllegalAddress);
  EXPECT_TRUE(eventually([&waited] { return waited.load(); }));
  gate.open();
  waiting.join();
  GpuUnderTest::instance().clear_faults();
  GpuUnderTest::instance().clear_reports();
}

// In a process of its own, since the driver keeps what a lost context holds.
TEST_F(CudaDeviceTest, WhatIsDestroyedInALostContextIsDestroyedQuietly) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  constexpr const char* kAlone = "TRAE_MEM_TEST_ALONE";
  if (std::getenv(kAlone) == nullptr) {
    const ScopedVariable alone(kAlone, "1");
    std::string filter = "--gtest_filter=CudaDeviceTest.WhatIsDestroyedInALostContext*";
    std::string program = "native_tests";
    std::string brief = "--gtest_brief=1";
    std::array<char*, 4> arguments = {program.data(), filter.data(), brief.data(), nullptr};
    pid_t child = 0;
    ASSERT_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ),
              0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
    return;
  }
  {
    const Window window(device_);
    const Stream stream(*device_);
    const Event event(*device_, /*timed=*/true);
    const auto buffer = device_->allocate_host(5000);
    write(window.begin(), test_bytes(100'000, 1));
    GpuUnderTest::instance().abort_context(kIllegalAddress);
    if (!says_lost([&] { device_->record(event.handle(), stream.handle()); })) _exit(1);
  }
  device_.reset();
  _exit(7);
}

TEST_F(CudaDeviceTest, InAForkedChildCallsSayWhyTheyFailAndNothingIsDestroyed) {
  Window window(device_);
  const auto buffer = device_->allocate_host(5000);
  const auto stream = std::make_unique<Stream>(*device_);
  write(window.begin(), test_bytes(10, 1));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    int said = 0;
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { static_cast<void>(device_->create(kPageBytes)); },
             [&] { device_->copy_to_device(window.begin(), buffer->data(), 10, kCallerStream); },
             [&] { static_cast<void>(device_->info()); }}) {
      try {
        call();
      } catch (const DeviceError& error) {
        if (std::string(error.what()).find("forked") != std::string::npos) ++said;
      }
    }
    buffer->data()[0] = std::byte{1};
    const_cast<std::unique_ptr<HostBuffer>&>(buffer).reset();
    const_cast<std::unique_ptr<Stream>&>(stream).reset();
    device_.reset();
    _exit(said);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 3);
  write(window.begin(), test_bytes(10, 2));  // the parent goes on
  EXPECT_EQ(read(window.begin(), 10), test_bytes(10, 2));
}

}  // namespace
}  // namespace trae_mem::test
