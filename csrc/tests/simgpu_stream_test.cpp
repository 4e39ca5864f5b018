// Simulated GPU: streams, events, contexts, and when the host waits.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <thread>

#include "simgpu_fixture.h"

namespace simgpu_test {
namespace {

using trae_mem::test::eventually;
using trae_mem::test::happens;

std::size_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

class SimgpuStream : public SimulatedGpu {
 protected:
  // "blocking" and "count" of a function since the last reset.
  [[nodiscard]] std::string counts(const std::string& function) const {
    const std::string all = text_of(sim().calls);
    const std::size_t at = all.find("\"" + function + "\": ");
    return at == std::string::npos ? "" : all.substr(at, all.find(", \"by\"", at) - at);
  }
};

TEST_F(SimgpuStream, WorkOfAStreamRunsInOrderWhileTheHostRunsAhead) {
  const Page page = make_page();
  const Stream stream = make_stream();
  std::vector<int> order;
  Gate gate;
  hold(gate, stream);
  queue([&order] { order.push_back(1); }, stream);
  ASSERT_EQ(cu().cuMemsetD8Async(page.address, 4, kPage, stream), 0);
  queue([&order] { order.push_back(2); }, stream);
  EXPECT_EQ(cu().cuStreamQuery(stream), kNotReady);
  EXPECT_TRUE(order.empty());
  gate.open();
  ASSERT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(cu().cuStreamQuery(stream), 0);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  expect_bytes(page.address, kPage, 4);
  drop_page(page);
}

TEST_F(SimgpuStream, StreamsDoNotWaitForEachOther) {
  const Stream held = make_stream();
  const Stream other = make_stream();
  Gate gate;
  hold(gate, held);
  EXPECT_EQ(cu().cuStreamSynchronize(other), 0);
  EXPECT_EQ(cu().cuStreamSynchronize(nullptr), 0) << "nor does the default stream";
  EXPECT_EQ(cu().cuStreamQuery(held), kNotReady);
}

TEST_F(SimgpuStream, AWaitIsForTheRecordBeforeIt) {
  const Stream first = make_stream();
  const Stream second = make_stream();
  const Event event = make_event();
  std::atomic<bool> reached = false;
  Gate one;
  Gate two;
  hold(one, first);
  ASSERT_EQ(cu().cuEventRecord(event, first), 0);
  ASSERT_EQ(cu().cuStreamWaitEvent(second, event, 0), 0);
  queue([&reached] { reached = true; }, second);
  hold(two, first);
  ASSERT_EQ(cu().cuEventRecord(event, first), 0);  // again: does not concern the wait
  EXPECT_FALSE(happens([&reached] { return reached.load(); }));
  one.open();
  EXPECT_TRUE(eventually([&reached] { return reached.load(); }));
  EXPECT_EQ(cu().cuEventQuery(event), kNotReady) << "asks for the last record";
  two.open();
  EXPECT_EQ(cu().cuEventSynchronize(event), 0);
  EXPECT_EQ(cu().cuEventQuery(event), 0);
}

TEST_F(SimgpuStream, AnEventNeverRecordedIsDone) {
  const Event event = make_event();
  EXPECT_EQ(cu().cuEventQuery(event), 0);
  EXPECT_EQ(cu().cuEventSynchronize(event), 0);
}

TEST_F(SimgpuStream, ElapsedTimeNeedsTwoTimedEventsThatAreDone) {
  const Event from = make_event(0);
  const Event to = make_event(0);
  const Event untimed = make_event();
  float milliseconds = -1;
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, from, to), kInvalidHandle) << "no record";
  const Stream stream = make_stream();
  ASSERT_EQ(cu().cuEventRecord(from, stream), 0);
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(cu().cuEventRecord(to, stream), 0);
  ASSERT_EQ(cu().cuEventRecord(untimed, stream), 0);
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, from, to), kNotReady);
  gate.open();
  ASSERT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, from, to), 0);
  EXPECT_GT(milliseconds, 0);
  EXPECT_EQ(cu().cuEventElapsedTime_v2(&milliseconds, from, untimed), kInvalidHandle);
}

TEST_F(SimgpuStream, ADestroyedStreamStillDoesWhatIsQueued) {
  const std::size_t threads = thread_count();
  Stream stream = nullptr;
  ASSERT_EQ(cu().cuStreamCreateWithPriority(&stream, 1, 0), 0);
  std::atomic<bool> done = false;
  {
    Gate gate;
    hold(gate, stream);
    queue([&done] { done = true; }, stream);
    ASSERT_EQ(cu().cuStreamDestroy_v2(stream), 0);
    EXPECT_FALSE(done);
  }
  EXPECT_TRUE(eventually([&done] { return done.load(); }));
  EXPECT_TRUE(eventually([threads] { return thread_count() <= threads; })) << "its thread ends";
}

TEST_F(SimgpuStream, PrioritiesAreKeptWithinTheirRange) {
  int priority = 1;
  EXPECT_EQ(cu().cuStreamGetPriority(make_stream(-3), &priority), 0);
  EXPECT_EQ(priority, -3);
  EXPECT_EQ(cu().cuStreamGetPriority(make_stream(-100), &priority), 0);
  EXPECT_EQ(priority, -5);
}

TEST_F(SimgpuStream, ACopyFromPageableMemoryBlocksTheHostAndOneFromPinnedDoesNot) {
  const Page page = make_page();
  HostPages pages(kPage);
  const Stream stream = make_stream();
  sim().reset_calls();
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pages.data(), kPage, stream), 0);
  EXPECT_EQ(cu().cuStreamQuery(stream), 0) << "the host waited";
  EXPECT_EQ(counts("cuMemcpyHtoDAsync"), "\"cuMemcpyHtoDAsync\": {\"count\": 1, \"blocking\": 1");
  ASSERT_EQ(cu().cuMemHostRegister_v2(pages.data(), kPage, 1), 0);
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pages.data(), kPage, stream), 0);
  EXPECT_EQ(cu().cuStreamQuery(stream), kNotReady) << "the host ran ahead";
  EXPECT_EQ(counts("cuMemcpyHtoDAsync"), "\"cuMemcpyHtoDAsync\": {\"count\": 2, \"blocking\": 1");
  gate.open();
  ASSERT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(counts("cuStreamSynchronize"),
            "\"cuStreamSynchronize\": {\"count\": 1, \"blocking\": 1");
  EXPECT_EQ(counts("cuStreamQuery"), "\"cuStreamQuery\": {\"count\": 2, \"blocking\": 0");
  ASSERT_EQ(cu().cuMemHostUnregister(pages.data()), 0);
  drop_page(page);
}

TEST_F(SimgpuStream, BytesTravelWithDelaysAndWithout) {
  const Page page = make_page();
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, kPage, 0), 0);
  auto* const bytes = static_cast<unsigned char*>(pinned);
  for (const std::uint64_t delay_us : {0, 200}) {
    sim().set_adversary(3, delay_us, 0);
    std::memset(bytes, static_cast<int>(delay_us % 100) + 1, kPage);
    ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, bytes, kPage, nullptr), 0);
    ASSERT_EQ(cu().cuStreamSynchronize(nullptr), 0);
    expect_bytes(page.address, kPage, bytes[0]);
  }
  ASSERT_EQ(cu().cuMemFreeHost(pinned), 0);
  drop_page(page);
}

TEST_F(SimgpuStream, ManyStreamsAndEventsKeepOneCounterInOrder) {
  // A ring of streams, each adding one behind the stream before it: any lost wait loses counts.
  constexpr int kStreams = 8;
  constexpr int kRounds = 50;
  sim().set_adversary(1, 20, 0);
  std::vector<Stream> ring;
  std::vector<Event> events;
  for (int i = 0; i < kStreams; ++i) {
    ring.push_back(make_stream());
    events.push_back(make_event());
  }
  int counter = 0;  // not atomic: ThreadSanitizer sees a wait that does not order
  for (int i = 0; i < kStreams * kRounds; ++i) {
    const auto at = static_cast<std::size_t>(i % kStreams);
    const std::size_t before = (at + kStreams - 1) % kStreams;
    if (i > 0) {
      ASSERT_EQ(cu().cuStreamWaitEvent(ring[at], events[before], 0), 0);
    }
    queue([&counter, i] { counter = counter == i ? i + 1 : -1; }, ring[at]);
    ASSERT_EQ(cu().cuEventRecord(events[at], ring[at]), 0);
  }
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  EXPECT_EQ(counter, kStreams * kRounds);
}

TEST_F(SimgpuStream, ThreadsMayShareAStream) {
  const Stream stream = make_stream();
  int counter = 0;  // only the stream's thread touches it
  const auto add = [](void* data) { ++*static_cast<int*>(data); };
  void* context = nullptr;
  ASSERT_EQ(cu().cuCtxGetCurrent(&context), 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      EXPECT_EQ(cu().cuCtxSetCurrent(context), 0);
      for (int n = 0; n < 100; ++n) EXPECT_EQ(cu().cuLaunchHostFunc(stream, add, &counter), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(counter, 400);
}

TEST_F(SimgpuStream, LaunchedWorkRunsOnTheStreamAndIsDestroyedOnce) {
  struct Work {
    std::atomic<int> runs{0};
    std::atomic<int> destroyed{0};
    const Driver* driver = nullptr;
    Stream stream = nullptr;
  } work;
  const auto run = [](void* data) { ++static_cast<Work*>(data)->runs; };
  const auto destroy = [](void* data) {
    auto* const gone = static_cast<Work*>(data);
    ++gone->destroyed;
    gone->driver->cuStreamQuery(gone->stream);  // may use the stream: no lock is held
  };
  const Page page = make_page();
  const simgpu_range touched{reinterpret_cast<void*>(page.address), kPage, 1};
  const Stream stream = make_stream();
  work.driver = &cu();
  work.stream = stream;
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(sim().launch(stream, "work", run, destroy, &work, &touched, 1), 0);
  EXPECT_EQ(work.runs, 0);
  gate.open();
  ASSERT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(work.runs, 1);
  EXPECT_EQ(work.destroyed, 1);
  sim().fail("simgpu_launch", 1, 0, 0, "");
  EXPECT_EQ(sim().launch(stream, "work", run, destroy, &work, &touched, 1), kUnknown);
  EXPECT_EQ(work.runs, 1);
  EXPECT_EQ(work.destroyed, 2) << "work that is refused is destroyed all the same";
  drop_page(page);
}

TEST_F(SimgpuStream, EachThreadHasAStackOfContexts) {
  void* const own = [this] {
    void* context = nullptr;
    EXPECT_EQ(cu().cuCtxGetCurrent(&context), 0);
    return context;
  }();
  std::thread([this, own] {
    void* context = own;
    EXPECT_EQ(cu().cuCtxGetCurrent(&context), 0);
    EXPECT_EQ(context, nullptr);
    Stream stream = nullptr;
    EXPECT_EQ(cu().cuStreamCreateWithPriority(&stream, 1, 0), kNoContext);
    EXPECT_EQ(cu().cuCtxPopCurrent_v2(&context), kNoContext);
    EXPECT_EQ(cu().cuCtxPushCurrent_v2(own), 0);
    int device = -1;
    EXPECT_EQ(cu().cuCtxGetDevice(&device), 0);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(cu().cuCtxPopCurrent_v2(&context), 0);
    EXPECT_EQ(context, own);
    EXPECT_EQ(cu().cuCtxGetDevice(&device), kNoContext);
  }).join();
}

TEST_F(SimgpuStream, AnEventOfOneDeviceIsNotRecordedOnAnothers) {
  if (device_count() < 2) GTEST_SKIP() << "needs TRAE_MEM_SIM=devices=2";
  const Event here = make_event();
  const Stream stream = make_stream();
  void* context = nullptr;
  ASSERT_EQ(cu().cuDevicePrimaryCtxRetain(&context, 1), 0);
  ASSERT_EQ(cu().cuCtxPushCurrent_v2(context), 0);
  Stream there = nullptr;
  ASSERT_EQ(cu().cuStreamCreateWithPriority(&there, 1, 0), 0);
  EXPECT_EQ(cu().cuEventRecord(here, there), kInvalidHandle);
  ASSERT_EQ(cu().cuEventRecord(here, stream), 0);
  EXPECT_EQ(cu().cuStreamWaitEvent(there, here, 0), 0) << "but waited for by any stream";
  EXPECT_EQ(cu().cuCtxSynchronize(), 0);
  EXPECT_EQ(cu().cuStreamDestroy_v2(there), 0);
  ASSERT_EQ(cu().cuCtxPopCurrent_v2(&context), 0);
  ASSERT_EQ(cu().cuDevicePrimaryCtxRelease_v2(1), 0);
}

TEST_F(SimgpuStream, AForkedChildCannotUseTheDriver) {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    // _exit: the child's copy of this program must not report tests of its own.
    _exit(cu().cuDeviceGetCount(&count) == kNotInitialized ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(SimgpuStream, FunctionsAreFoundByName) {
  void* function = nullptr;
  int status = -1;
  ASSERT_EQ(cu().cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &status), 0);
  EXPECT_EQ(function, reinterpret_cast<void*>(cu().cuMemAlloc_v2)) << "the version of the headers";
  EXPECT_EQ(status, 0);
  ASSERT_EQ(cu().cuGetProcAddress_v2("cuMemcpyHtoDAsync", &function, 12000, 0, &status), 0);
  EXPECT_EQ(function, reinterpret_cast<void*>(cu().cuMemcpyHtoDAsync_v2)) << "by another macro";
  EXPECT_EQ(cu().cuGetProcAddress_v2("cuNoSuchThing", &function, 12000, 0, &status), 500);
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(status, 1);
}

TEST_F(SimgpuStream, WhatIsNotModelledSaysSo) {
  static bool said = false;  // once in a process, however often the tests are repeated
  void* graph = nullptr;
  testing::internal::CaptureStderr();
  EXPECT_EQ(cu().cuGraphCreate(&graph, 0), kNotSupported);
  EXPECT_EQ(cu().cuGraphCreate(&graph, 0), kNotSupported);
  const std::string note =
      "simulated GPU: cuGraphCreate, called from native_tests, is not modelled; it returns "
      "\"operation not supported\" (801). CUDA graphs are not modelled.\n";
  EXPECT_EQ(testing::internal::GetCapturedStderr(), said ? "" : note);
  said = true;
}

}  // namespace
}  // namespace simgpu_test
