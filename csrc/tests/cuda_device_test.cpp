// What is particular to CudaDevice: the shared context, raw streams, pinned memory and what happens
// without it, waits for reads, lost contexts, forks.
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

// --- the context and the memory
// -------------------------------------------------------------------

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
  const std::int64_t before = now_ns();
  ASSERT_EQ(driver.cuEventRecord(event.pointer(), stream.pointer()), cuda::kSuccess);
  ASSERT_EQ(driver.cuEventSynchronize(event.pointer()), cuda::kSuccess);
  const std::int64_t behind = now_ns();
  std::optional<std::int64_t> time;
  int answers = 0;
  ASSERT_TRUE(eventually([&] {
    time = clock.host_ns(event.pointer());
    if (time.has_value()) ++answers;
    return answers > 200;
  }));
  constexpr std::int64_t kTolerance = 1'000'000;
  EXPECT_GE(*time, before - kTolerance);
  EXPECT_LE(*time, behind + kTolerance);
  clock.synchronize();
}

// --- host memory
// ----------------------------------------------------------------------------------

TEST_F(CudaDeviceTest, CopiesOfPinnedMemoryAreQueuedAndNothingElseHappens) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  const Window window(device_);
  const auto pinned = pinned_copy(test_bytes(kPageBytes, 1));
  const Stream stream(*device_);
  gpu.reset_calls();
  device_->copy_to_device(window.begin() + 1, pinned->data() + 5, 1000, stream.handle());
  device_->copy_to_host(pinned->data(), window.begin(), 4, stream.handle());
  EXPECT_EQ(gpu.calls("cuMemcpyHtoDAsync"), 1U);
  EXPECT_EQ(gpu.calls("cuLaunchHostFunc"), 0U);
  EXPECT_EQ(gpu.blocking_calls(), 0U);
  device_->synchronize(stream.handle());
  EXPECT_EQ(device_->pinning_note(), "");
}

TEST_F(CudaDeviceTest, APinnedBufferMayOutliveItsDevice) {
  auto buffer = device_->allocate_host(100'000);
  device_.reset();
  buffer->data()[99'999] = std::byte{1};
  buffer.reset();
}

TEST_F(CudaDeviceTest, MemoryThatCannotBePinnedIsCopiedThroughTheRingAndTheReasonKept) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  const Window window(device_);
  gpu.fail("cuMemHostRegister", 1, cuda::kOutOfMemory);
  const auto bytes = test_bytes(kPageBytes, 2);
  const auto plain = pinned_copy(bytes);
  const std::string note = device_->pinning_note();
  EXPECT_NE(note.find("2.00 MiB cannot be pinned: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"),
            std::string::npos)
      << note;
  EXPECT_NE(note.find("ulimit -l"), std::string::npos) << note;
  gpu.reset_calls();
  const Stream stream(*device_);
  device_->copy_to_device(window.begin(), plain->data(), kPageBytes, stream.handle());
  EXPECT_EQ(gpu.blocking_calls(), 0U);
  EXPECT_GT(gpu.calls("cuLaunchHostFunc"), 1U);
  device_->synchronize(stream.handle());
  EXPECT_EQ(read(window.begin(), kPageBytes), bytes);
  EXPECT_EQ(device_->pinning_note(), note);
  const auto pinned = pinned_copy(bytes);  // the next one may well succeed
  gpu.reset_calls();
  device_->copy_to_device(window.begin(), pinned->data(), kPageBytes, stream.handle());
  EXPECT_EQ(gpu.calls("cuLaunchHostFunc"), 0U);
  device_->synchronize(stream.handle());
}

TEST_F(CudaDeviceTest, WithoutAPinnedRingNothingButPinnedMemoryIsCopied) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  const Window window(device_);
  const auto bytes = test_bytes(5000, 3);
  for (const std::uint64_t buffer : {1U, 2U}) {
    GpuUnderTest::instance().fail("cuMemHostRegister", buffer, cuda::kNotPermitted);
    const std::string message = message_of<DeviceError>([&] { write(window.begin(), bytes); });
    EXPECT_NE(message.find("staging"), std::string::npos) << message;
    EXPECT_NE(message.find("TRAE_MEM_STAGING"), std::string::npos) << message;
    EXPECT_NE(message.find("(800)"), std::string::npos) << message;
  }
  const auto pinned = pinned_copy(bytes);
  const Stream stream(*device_);
  device_->copy_to_device(window.begin(), pinned->data(), 5000, stream.handle());
  device_->synchronize(stream.handle());
  EXPECT_EQ(read(window.begin(), 5000), bytes);
  write(window.begin() + 1, bytes);  // tried again
  EXPECT_EQ(read(window.begin() + 1, 5000), bytes);
}

// --- [Note: reads and waits]
// ----------------------------------------------------------------------

TEST_F(CudaDeviceTest, AWaitBlocksUntilTheSourceIsRead) {
  const Window window(device_);
  const Stream copies(*device_);
  const Stream compute(*device_);
  const Event loaded(*device_);
  Gate gate;
  const auto bytes = test_bytes(100'000, 4);
  device_->copy_to_device(window.begin(), std::make_shared<HeldSource>(gate.task(), bytes),
                          bytes.size(), copies.handle());
  device_->record(loaded.handle(), copies.handle());
  std::atomic<bool> waited = false;
  std::thread waiting([&] {
    device_->wait(compute.handle(), loaded.handle());
    waited = true;
  });
  EXPECT_FALSE(happens([&waited] { return waited.load(); }));
  gate.open();
  waiting.join();
  device_->synchronize(compute.handle());
  EXPECT_EQ(read(window.begin(), bytes.size()), bytes);
}

TEST_F(CudaDeviceTest, AWaitDoesNotBlockForTheCopyOfWhatIsRead) {
  TRAE_MEM_REQUIRE_SIMULATOR();  // a real driver may hold the reads up with the gate
  const Window window(device_);
  const Stream copies(*device_);
  const Stream compute(*device_);
  const Event loaded(*device_);
  Gate gate;
  const auto bytes = test_bytes(100'000, 5);
  device_->run(gate.task(), copies.handle());
  device_->copy_to_device(window.begin(), std::make_shared<HeldSource>([] {}, bytes), bytes.size(),
                          copies.handle());
  device_->record(loaded.handle(), copies.handle());
  GpuUnderTest::instance().reset_calls();
  device_->wait(compute.handle(), loaded.handle());  // would never return otherwise
  EXPECT_EQ(GpuUnderTest::instance().blocking_calls(), 0U);
  EXPECT_FALSE(device_->query(loaded.handle()));
  gate.open();
  device_->synchronize(compute.handle());
}

TEST_F(CudaDeviceTest, AWaitDoesNotBlockForCopiesFromMemory) {
  const Window window(device_);
  const Stream copies(*device_);
  const Stream compute(*device_);
  const Event loaded(*device_);
  const auto bytes = test_bytes(100'000, 6);
  Gate gate;
  device_->run(gate.task(), copies.handle());
  device_->copy_to_device(window.begin(), bytes.data(), bytes.size(), copies.handle());
  device_->record(loaded.handle(), copies.handle());
  device_->wait(compute.handle(), loaded.handle());
  EXPECT_FALSE(device_->query(loaded.handle()));
  gate.open();
  device_->synchronize(compute.handle());
  EXPECT_EQ(read(window.begin(), bytes.size()), bytes);
}

TEST_F(CudaDeviceTest, AWaitThrowsWhatAReadThrewAndTheRingGoesOn) {
  const Window window(device_);
  const Stream copies(*device_);
  const Stream compute(*device_);
  const Event loaded(*device_);
  const auto bytes = test_bytes(kPageBytes, 7);
  for (std::size_t chunk = 0; chunk < 5; ++chunk) {
    const auto reads = std::make_shared<std::atomic<std::size_t>>(0);
    const auto fail_there = [reads, chunk] {
      if ((*reads)++ == chunk) throw FileError("gone at " + std::to_string(chunk));
    };
    device_->copy_to_device(window.begin(), std::make_shared<HeldSource>(fail_there, bytes),
                            bytes.size(), copies.handle());
    device_->record(loaded.handle(), copies.handle());
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(message_of<FileError>([&] { device_->wait(compute.handle(), loaded.handle()); }),
                "gone at " + std::to_string(chunk));
    }
    device_->synchronize(copies.handle());
    EXPECT_EQ(*reads, chunk + 1) << "behind a failure nothing is read";
    device_->copy_to_device(window.begin(), std::make_shared<HeldSource>([] {}, bytes),
                            bytes.size(), copies.handle());
    device_->record(loaded.handle(), copies.handle());
    device_->wait(compute.handle(), loaded.handle());
    device_->synchronize(compute.handle());
    EXPECT_EQ(read(window.begin(), kPageBytes), bytes);
  }
}

// Copies of several streams share the ring's two buffers, with delays wherever an event must order
// them.
TEST_F(CudaDeviceTest, CopiesOfSeveralStreamsDoNotMixInTheRing) {
  GpuUnderTest::instance().set_adversary(3, 200, true);
  constexpr std::size_t kStreams = 3;
  constexpr std::size_t kBytes = 300'000;  // five chunks
  std::vector<std::unique_ptr<Window>> windows;
  std::vector<std::unique_ptr<Stream>> streams;
  for (std::size_t i = 0; i < kStreams; ++i) {
    windows.push_back(std::make_unique<Window>(device_));
    streams.push_back(std::make_unique<Stream>(*device_));
  }
  std::vector<std::vector<std::byte>> memory;
  for (std::size_t round = 0; round < 8; ++round) {
    for (std::size_t i = 0; i < kStreams; ++i) {
      memory.push_back(test_bytes(kBytes, round * kStreams + i));
      const Address to = windows[i]->begin() + 11 * i;
      if ((round + i) % 2 == 0) {
        device_->copy_to_device(to, memory.back().data(), kBytes, streams[i]->handle());
      } else {
        device_->copy_to_device(to, std::make_shared<HeldSource>([] {}, memory.back()), kBytes,
                                streams[i]->handle());
      }
    }
  }
  for (std::size_t i = 0; i < kStreams; ++i) {
    device_->synchronize(streams[i]->handle());
    EXPECT_EQ(read(windows[i]->begin() + 11 * i, kBytes), memory[7 * kStreams + i]) << i;
  }
}

TEST_F(CudaDeviceTest, ARefusedCallInTheRingLosesNoOthersBytes) {
  TRAE_MEM_REQUIRE_SIMULATOR();
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  gpu.set_adversary(5, 150, false);
  const Window window(device_);
  const Stream first(*device_);
  const Stream second(*device_);
  constexpr std::size_t kBytes = 250'000;    // four chunks
  write(window.begin(), test_bytes(10, 1));  // makes the ring
  for (const char* function :
       {"cuStreamWaitEvent", "cuEventRecord", "cuLaunchHostFunc", "cuMemcpyHtoDAsync"}) {
    for (std::uint64_t nth = 1; nth <= 10; ++nth) {
      SCOPED_TRACE(std::string(function) + " " + std::to_string(nth));
      const auto before = test_bytes(kBytes, nth);
      const auto lost = test_bytes(kBytes, nth + 100);
      const auto behind = test_bytes(kBytes, nth + 200);
      device_->copy_to_device(window.begin(), before.data(), kBytes, first.handle());
      gpu.fail(function, nth, cuda::kUnknown);
      const auto copy_behind = [&](const std::vector<std::byte>& bytes) {
        device_->copy_to_device(window.begin() + kBytes, bytes.data(), kBytes, second.handle());
      };
      try {
        copy_behind(lost);
      } catch (const DeviceError& error) {
        EXPECT_NE(std::string(error.what()).find(function), std::string::npos) << error.what();
      }
      gpu.clear_faults();
      copy_behind(behind);
      device_->synchronize(first.handle());
      device_->synchronize(second.handle());
      EXPECT_EQ(read(window.begin(), kBytes), before);
      EXPECT_EQ(read(window.begin() + kBytes, kBytes), behind);
    }
  }
}

// --- lost contexts, forks
// -------------------------------------------------------------------------

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
