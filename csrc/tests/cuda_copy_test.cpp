// How bytes reach a GPU: from pinned memory directly, from elsewhere through the staging ring; and
// what a wait waits for.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "gpu_fixture.h"

namespace trae_mem::test {
namespace {

class CudaCopyTest : public GpuTest {};

// --- host memory --------------------------------------------------------------------------------

TEST_F(CudaCopyTest, CopiesOfPinnedMemoryAreQueuedAndNothingElseHappens) {
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

TEST_F(CudaCopyTest, APinnedBufferMayOutliveItsDevice) {
  auto buffer = device_->allocate_host(100'000);
  device_.reset();
  buffer->data()[99'999] = std::byte{1};
  buffer.reset();
}

TEST_F(CudaCopyTest, MemoryThatCannotBePinnedIsCopiedThroughTheRingAndTheReasonKept) {
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

TEST_F(CudaCopyTest, WithoutAPinnedRingNothingButPinnedMemoryIsCopied) {
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

// --- [Note: reads and waits] --------------------------------------------------------------------

TEST_F(CudaCopyTest, AWaitBlocksUntilTheSourceIsRead) {
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

TEST_F(CudaCopyTest, AWaitDoesNotBlockForTheCopyOfWhatIsRead) {
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

TEST_F(CudaCopyTest, AWaitDoesNotBlockForCopiesFromMemory) {
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

TEST_F(CudaCopyTest, AWaitThrowsWhatAReadThrewAndTheRingGoesOn) {
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
TEST_F(CudaCopyTest, CopiesOfSeveralStreamsDoNotMixInTheRing) {
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

TEST_F(CudaCopyTest, ARefusedCallInTheRingLosesNoOthersBytes) {
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

}  // namespace
}  // namespace trae_mem::test
