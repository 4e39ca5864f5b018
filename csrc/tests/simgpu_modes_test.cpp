// Simulated GPU: what a process chooses once by TRAE_MEM_SIM. Each test here runs this program
// again with another choice; the child's part is a disabled test of the same name.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "simgpu_fixture.h"

namespace simgpu_test {
namespace {

struct Outcome {
  int status;
  std::string output;
};

class SimgpuModes : public SimulatedGpu {
 protected:
  static Outcome child(const std::string& configuration, const std::string& test) {
    const trae_mem::test::ScopedVariable variable("TRAE_MEM_SIM", configuration.c_str());
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    const std::string command = "'" + self + "' --gtest_also_run_disabled_tests --gtest_output= " +
                                "--gtest_filter=Simgpu*Child.DISABLED_" + test + " 2>&1";
    FILE* const pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) throw std::runtime_error("popen failed");
    Outcome outcome{};
    std::array<char, 4096> buffer{};
    while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr)
      outcome.output += buffer.data();
    outcome.status = WEXITSTATUS(pclose(pipe));
    return outcome;
  }
};

class SimgpuChild : public SimulatedGpu {};

TEST_F(SimgpuModes, DryMemoryCostsNothingAndReadsAsZeros) {
  const Outcome done = child("mode=dry,memory=85899345920,gpu=H100", "Dry");
  EXPECT_EQ(done.status, 0) << done.output;
}

TEST_F(SimgpuChild, DISABLED_Dry) {
  EXPECT_EQ(sim().mode(), 1);
  constexpr std::size_t kMuch = std::size_t{79} << 30;
  Pointer address = 0;
  ASSERT_EQ(cu().cuMemAlloc_v2(&address, kMuch), 0);
  EXPECT_EQ(sim().used_bytes(0), kMuch);
  Pointer more = 0;
  EXPECT_EQ(cu().cuMemAlloc_v2(&more, 2 * std::size_t{1} << 30), kOutOfMemory);
  ASSERT_EQ(cu().cuMemsetD8Async(address, 1, kMuch, nullptr), 0);
  std::vector<unsigned char> bytes(100, 7);
  ASSERT_EQ(cu().cuMemcpyDtoH_v2(bytes.data(), address + kMuch - 100, 100), 0);
  EXPECT_EQ(bytes, std::vector<unsigned char>(100, 0));
  EXPECT_EQ(sim().work(nullptr, "gemm", 1e12, 1e9), 0);
  EXPECT_EQ(cu().cuMemcpyHtoDAsync_v2(address + kMuch - 1, bytes.data(), 2, nullptr),
            kInvalidValue);
  expect_report("illegal address");
  EXPECT_EQ(cu().cuMemFree_v2(address), 0);
}

TEST_F(SimgpuModes, WithPaceWorkTakesItsModelledTime) {
  const Outcome done = child("mode=dry,pace=1,link=1000000000,flops=1000000000000", "Pace");
  EXPECT_EQ(done.status, 0) << done.output;
}

TEST_F(SimgpuChild, DISABLED_Pace) {
  const Page page = make_page();
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, kPage, 0), 0);
  const Stream compute = make_stream();
  const Stream copies = make_stream();
  const Event begin = make_event(0);
  const Event loaded = make_event(0);
  const Event end = make_event(0);
  float milliseconds = 0;
  Gate gate;  // what is queued while it is closed begins when it opens, at one time
  hold(gate, compute);
  ASSERT_EQ(cu().cuEventRecord(begin, compute), 0);
  ASSERT_EQ(cu().cuStreamWaitEvent(copies, begin, 0), 0);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pinned, 2'000'000, copies), 0);
  ASSERT_EQ(cu().cuEventRecord(loaded, copies), 0);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(sim().work(compute, "small", 0, 0), 0);  // 0.5 ms
  ASSERT_EQ(sim().work(compute, "gemm", 1e9, 0), 0);                               // 1 ms
  ASSERT_EQ(cu().cuStreamWaitEvent(compute, loaded, 0), 0);                        // until 2 ms
  ASSERT_EQ(sim().work(compute, "gemm", 3e9, 0), 0);                               // 3 ms
  ASSERT_EQ(cu().cuEventRecord(end, compute), 0);
  std::chrono::steady_clock::time_point seen;
  const auto see = [](void* data) {
    *static_cast<decltype(seen)*>(data) = std::chrono::steady_clock::now();
  };
  ASSERT_EQ(sim().launch(compute, "seen by the host", see, nullptr, &seen, nullptr, 0), 0);
  const auto opened = std::chrono::steady_clock::now();
  gate.open();
  ASSERT_EQ(cu().cuStreamSynchronize(compute), 0);
  EXPECT_GE(seen - opened, std::chrono::milliseconds(5)) << "shown before its modelled time";
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, begin, loaded), 0);
  EXPECT_NEAR(milliseconds, 2.0, 1e-3);
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, begin, end), 0);
  EXPECT_NEAR(milliseconds, 5.0, 1e-3);
  EXPECT_NEAR(sim().busy_seconds(0, 0), 4.5e-3, 1e-9);
  EXPECT_NEAR(sim().busy_seconds(0, 1), 2e-3, 1e-9);
  EXPECT_EQ(sim().busy_seconds(0, 2), 0);
  EXPECT_EQ(cu().cuMemFreeHost(pinned), 0);
  drop_page(page);
}

TEST_F(SimgpuModes, TwoCopiesShareTheLink) {
  const Outcome done = child("mode=dry,pace=1,link=1000000000", "Link");
  EXPECT_EQ(done.status, 0) << done.output;
}

TEST_F(SimgpuChild, DISABLED_Link) {
  const Page page = make_page();
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, kPage, 0), 0);
  const Stream first = make_stream();
  const Stream second = make_stream();
  const Event begin = make_event(0);
  const std::array<Event, 3> ends = {make_event(0), make_event(0), make_event(0)};
  Gate gate;
  hold(gate, first);
  ASSERT_EQ(cu().cuEventRecord(begin, first), 0);
  ASSERT_EQ(cu().cuStreamWaitEvent(second, begin, 0), 0);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pinned, 2'000'000, first), 0);
  ASSERT_EQ(cu().cuEventRecord(ends[0], first), 0);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pinned, 2'000'000, second), 0);
  ASSERT_EQ(cu().cuEventRecord(ends[1], second), 0);
  gate.open();
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  float one = 0;
  float other = 0;
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&one, begin, ends[0]), 0);
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&other, begin, ends[1]), 0);
  EXPECT_NEAR(std::min(one, other), 2.0, 1e-3);
  EXPECT_NEAR(std::max(one, other), 4.0, 1e-3);
  sim().set_link(0);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pinned, 2'000'000, first), 0);
  ASSERT_EQ(cu().cuEventRecord(ends[2], first), 0);
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  EXPECT_NEAR(sim().busy_seconds(0, 1), 4e-3, 1e-9) << "without a limit no time is taken";
  EXPECT_EQ(cu().cuMemFreeHost(pinned), 0);
  drop_page(page);
}

TEST_F(SimgpuModes, ACopyOfAHigherPriorityGoesFirstWhenTheLinkBecomesFree) {
  const Outcome done = child("mode=dry,pace=1,link=10000000", "Priority");
  EXPECT_EQ(done.status, 0) << done.output;
}

TEST_F(SimgpuChild, DISABLED_Priority) {
  const Page page = make_page();
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, kPage, 0), 0);
  const std::array<Stream, 3> streams = {make_stream(0), make_stream(0), make_stream(-5)};
  const std::array<std::size_t, 3> bytes = {2'000'000, 100'000, 100'000};  // 200, 10, 10 ms
  const std::array<Event, 3> ends = {make_event(0), make_event(0), make_event(0)};
  const Stream timer = make_stream();
  const Event begin = make_event(0);
  const Event later = make_event(0);
  Gate gate;
  hold(gate, streams[0]);
  ASSERT_EQ(cu().cuEventRecord(begin, streams[0]), 0);
  ASSERT_EQ(cu().cuStreamWaitEvent(timer, begin, 0), 0);
  ASSERT_EQ(sim().work(timer, "time", 10e12, 0), 0);  // 100 ms: while the first copy is under way
  ASSERT_EQ(cu().cuEventRecord(later, timer), 0);
  for (std::size_t i = 0; i < 3; ++i) {
    if (i > 0) {
      ASSERT_EQ(cu().cuStreamWaitEvent(streams[i], later, 0), 0);
    }
    ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pinned, bytes[i], streams[i]), 0);
    ASSERT_EQ(cu().cuEventRecord(ends[i], streams[i]), 0);
  }
  gate.open();
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  const std::array<float, 3> expected = {200, 220, 210};
  for (std::size_t i = 0; i < 3; ++i) {
    float milliseconds = 0;
    EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, begin, ends[i]), 0);
    EXPECT_NEAR(milliseconds, expected[i], 1e-2) << i;
  }
  EXPECT_EQ(cu().cuMemFreeHost(pinned), 0);
  drop_page(page);
}

TEST_F(SimgpuModes, AConfigurationThatIsNotUnderstoodEndsTheProcess) {
  for (const auto& [text, said] : std::vector<std::pair<std::string, std::string>>{
           {"mode=wet", "mode=wet: expected numeric or dry"},
           {"memory=24GiB", "memory=24GiB: expected a whole number"},
           {"colour=red", "unknown key \"colour\"; known: bandwidth, delay_us"},
           {"devices", "\"devices\" is not key=value"}}) {
    const Outcome done = child(text, "Nothing");
    EXPECT_EQ(done.status, 2) << done.output;
    EXPECT_NE(done.output.find(said), std::string::npos) << done.output;
  }
}

TEST_F(SimgpuChild, DISABLED_Nothing) { SUCCEED(); }

TEST_F(SimgpuModes, AtExitAProcessIsToldWhatItStillHolds) {
  const Outcome done = child("memory=1073741824", "Leak");
  EXPECT_EQ(done.status, 0) << done.output;
  EXPECT_NE(done.output.find("leak: native_tests still holds at exit: streams 1"),
            std::string::npos)
      << done.output;
}

// In a suite of its own, since the fixture would notice.
TEST(SimgpuLeakingChild, DISABLED_Leak) {
  const Driver& cu = Simulator::find()->cu;
  void* context = nullptr;
  ASSERT_EQ(cu.cuInit(0), 0);
  ASSERT_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), 0);
  ASSERT_EQ(cu.cuCtxSetCurrent(context), 0);
  Stream stream = nullptr;
  ASSERT_EQ(cu.cuStreamCreateWithPriority(&stream, 1, 0), 0);
}

TEST_F(SimgpuModes, InvisibleDevicesAreNotThere) {
  const trae_mem::test::ScopedVariable variable("CUDA_VISIBLE_DEVICES", "1");
  const Outcome done = child("devices=2", "OneDevice");
  EXPECT_EQ(done.status, 0) << done.output;
}

TEST_F(SimgpuChild, DISABLED_OneDevice) { EXPECT_EQ(device_count(), 1); }

TEST_F(SimgpuModes, WithoutAnyDeviceTheDriverDoesNotInitialise) {
  const trae_mem::test::ScopedVariable variable("CUDA_VISIBLE_DEVICES", "");
  const Outcome done = child("devices=2", "Nothing");
  EXPECT_NE(done.status, 0);
  EXPECT_NE(done.output.find("100"), std::string::npos) << done.output;
}

}  // namespace
}  // namespace simgpu_test
