// Simulated GPU: misuse is reported, work that cannot be done fails the context, and calls fail on
// demand.
#include <atomic>
#include <thread>

#include "simgpu_fixture.h"

namespace simgpu_test {
namespace {

class SimgpuSanitizer : public SimulatedGpu {
 protected:
  void expect_context_failed(int code = kIllegalAddress) {
    EXPECT_EQ(cu().cuCtxSynchronize(), code);
    Stream stream = nullptr;
    EXPECT_EQ(cu().cuStreamCreateWithPriority(&stream, 1, 0), code) << "for every later call";
    sim().clear_faults();
    EXPECT_EQ(cu().cuCtxSynchronize(), 0) << "healed";
  }
};

TEST_F(SimgpuSanitizer, UnmapUnderPendingWork) {
  const Page page = make_page();
  const Stream stream = make_stream();
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(cu().cuMemsetD8Async(page.address, 1, kPage, stream), 0);
  EXPECT_EQ(cu().cuMemUnmap(page.address, kPage), 0) << "a GPU would not notice either";
  const std::string report = expect_report("unmap under pending work");
  EXPECT_NE(report.find("cuMemsetD8Async"), std::string::npos) << report;
  EXPECT_NE(report.find("native_tests"), std::string::npos) << "a stack: " << report;
  gate.open();
  EXPECT_EQ(cu().cuStreamSynchronize(stream), kIllegalAddress);
  expect_report("illegal address");
  expect_context_failed();
  EXPECT_EQ(cu().cuMemRelease(page.handle), 0);
  EXPECT_EQ(cu().cuMemAddressFree(page.address, kPage), 0);
}

TEST_F(SimgpuSanitizer, UnmapWaitsForWorkThatIsRunning) {
  const Page page = make_page();
  const Stream stream = make_stream();
  struct Work {
    Gate gate;
    std::atomic<bool> done{false};
    unsigned char* bytes;
  } work;
  work.bytes = reinterpret_cast<unsigned char*>(page.address);
  const auto run = [](void* data) {
    auto* const running = static_cast<Work*>(data);
    running->gate.task()();
    running->bytes[5] = 1;  // would be a fault if it were unmapped
    running->done = true;
  };
  const simgpu_range touched{work.bytes, kPage, 1};
  ASSERT_EQ(sim().launch(stream, "kernel", run, nullptr, &work, &touched, 1), 0);
  ASSERT_TRUE(trae_mem::test::eventually([&work] { return work.gate.reached(); }));
  std::atomic<bool> unmapped = false;
  void* context = nullptr;
  ASSERT_EQ(cu().cuCtxGetCurrent(&context), 0);
  std::thread thread([&] {
    EXPECT_EQ(cu().cuCtxSetCurrent(context), 0);
    EXPECT_EQ(cu().cuMemUnmap(page.address, kPage), 0);
    unmapped = true;
  });
  EXPECT_FALSE(trae_mem::test::happens([&unmapped] { return unmapped.load(); }));
  work.gate.open();
  thread.join();
  EXPECT_TRUE(work.done);
  expect_report("unmap under pending work");
  EXPECT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(cu().cuMemRelease(page.handle), 0);
  EXPECT_EQ(cu().cuMemAddressFree(page.address, kPage), 0);
}

TEST_F(SimgpuSanitizer, PartialUnmap) {
  Pointer address = 0;
  unsigned long long handle = 0;
  const Properties properties;
  ASSERT_EQ(cu().cuMemAddressReserve(&address, 2 * kPage, 0, 0, 0), 0);
  ASSERT_EQ(cu().cuMemCreate(&handle, 2 * kPage, &properties, 0), 0);
  ASSERT_EQ(cu().cuMemMap(address, 2 * kPage, 0, handle, 0), 0);
  EXPECT_EQ(cu().cuMemUnmap(address, kPage), kInvalidValue);
  expect_report("partial unmap");
  EXPECT_EQ(cu().cuMemUnmap(address + kPage, kPage), kInvalidValue);
  expect_report("partial unmap");
  EXPECT_EQ(cu().cuMemAddressFree(address, 2 * kPage), kInvalidValue);
  expect_report("address range freed while mapped");
  EXPECT_EQ(cu().cuMemUnmap(address, 2 * kPage), 0);
  EXPECT_EQ(cu().cuMemRelease(handle), 0);
  EXPECT_EQ(cu().cuMemAddressFree(address, 2 * kPage), 0);
}

TEST_F(SimgpuSanitizer, MissingSetAccess) {
  Pointer address = 0;
  unsigned long long handle = 0;
  const Properties properties;
  ASSERT_EQ(cu().cuMemAddressReserve(&address, kPage, 0, 0, 0), 0);
  ASSERT_EQ(cu().cuMemCreate(&handle, kPage, &properties, 0), 0);
  ASSERT_EQ(cu().cuMemMap(address, kPage, 0, handle, 0), 0);
  EXPECT_EQ(cu().cuMemsetD8Async(address, 1, kPage, nullptr), 0);
  expect_context_failed();
  expect_report("missing set-access");
  EXPECT_EQ(cu().cuMemUnmap(address, kPage), 0);
  EXPECT_EQ(cu().cuMemRelease(handle), 0);
  EXPECT_EQ(cu().cuMemAddressFree(address, kPage), 0);
}

TEST_F(SimgpuSanitizer, CopiesOfNobodysMemoryAreRefused) {
  Pointer address = 0;
  unsigned char byte = 0;
  ASSERT_EQ(cu().cuMemAddressReserve(&address, kPage, 0, 0, 0), 0);
  EXPECT_EQ(cu().cuMemcpyHtoDAsync_v2(address, &byte, 1, nullptr), kInvalidValue);
  expect_report("illegal address");
  EXPECT_EQ(cu().cuMemsetD8Async(address, 1, 1, nullptr), kInvalidValue);
  expect_report("illegal address");
  const Page page = make_page();
  EXPECT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address + kPage - 1, &byte, 2, nullptr), kInvalidValue);
  expect_report("illegal address");
  HostPages pages(kPage);
  unsigned char* const gone = pages.data();
  pages.drop();
  EXPECT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, gone, 1, nullptr), kInvalidValue);
  expect_report("illegal address");
  drop_page(page);
  EXPECT_EQ(cu().cuMemAddressFree(address, kPage), 0);
}

TEST_F(SimgpuSanitizer, AKernelOnAnUnmappedRangeFailsTheContextAndTheWorkBehindIt) {
  struct Work {
    std::atomic<int> runs{0};
    std::atomic<int> destroyed{0};
  } work;
  const auto run = [](void* data) { ++static_cast<Work*>(data)->runs; };
  const auto destroy = [](void* data) { ++static_cast<Work*>(data)->destroyed; };
  Pointer address = 0;
  ASSERT_EQ(cu().cuMemAddressReserve(&address, kPage, 0, 0, 0), 0);
  const simgpu_range touched{reinterpret_cast<void*>(address), 100, 0};
  const Stream stream = make_stream();
  const Event event = make_event();
  Gate gate;
  hold(gate, stream);
  EXPECT_EQ(sim().launch(stream, "bad", run, destroy, &work, &touched, 1), 0);
  EXPECT_EQ(sim().launch(stream, "behind it", run, destroy, &work, nullptr, 0), 0);
  EXPECT_EQ(cu().cuEventRecord(event, stream), 0);
  gate.open();
  EXPECT_EQ(cu().cuEventSynchronize(event), kIllegalAddress) << "and does not hang";
  EXPECT_EQ(cu().cuEventQuery(event), kIllegalAddress);
  EXPECT_EQ(work.runs, 0);
  EXPECT_EQ(work.destroyed, 2);
  const std::string report = expect_report("illegal address");
  EXPECT_NE(report.find("bad from native_tests"), std::string::npos) << report;
  expect_context_failed();
  EXPECT_EQ(cu().cuMemAddressFree(address, kPage), 0);
}

TEST_F(SimgpuSanitizer, AnAbortFailsTheContext) {
  sim().abort(nullptr, 710, "kernel error", "aten::add: \"no\"");
  const std::string report = expect_report("kernel error");
  EXPECT_NE(report.find("aten::add: \\\"no\\\""), std::string::npos) << report;
  expect_context_failed(710);
}

TEST_F(SimgpuSanitizer, HostMemoryThatIsUnregisteredUnderACopy) {
  const Page page = make_page();
  HostPages pages(kPage);
  const Stream stream = make_stream();
  ASSERT_EQ(cu().cuMemHostRegister_v2(pages.data(), kPage, 1), 0);
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, pages.data(), kPage, stream), 0);
  EXPECT_EQ(cu().cuMemHostUnregister(pages.data()), 0);
  expect_report("free under pending work");
  // Registered again it is other memory to the device.
  ASSERT_EQ(cu().cuMemHostRegister_v2(pages.data(), kPage, 1), 0);
  gate.open();
  EXPECT_EQ(cu().cuStreamSynchronize(stream), kIllegalAddress);
  expect_report("copy from unregistered host memory");
  expect_context_failed();
  EXPECT_EQ(cu().cuMemHostUnregister(pages.data()), 0);
  drop_page(page);
}

TEST_F(SimgpuSanitizer, PinnedMemoryThatIsFreedUnderACopy) {
  const Page page = make_page();
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, kPage, 0), 0);
  const Stream stream = make_stream();
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(cu().cuMemcpyDtoHAsync_v2(pinned, page.address, kPage, stream), 0);
  EXPECT_EQ(cu().cuMemFreeHost(pinned), 0);
  expect_report("free under pending work");
  gate.open();
  EXPECT_EQ(cu().cuStreamSynchronize(stream), kIllegalAddress);
  expect_report("copy from unregistered host memory");
  expect_context_failed();
  drop_page(page);
}

TEST_F(SimgpuSanitizer, RegisteredMemoryThatIsGoneUnderACopy) {
  const Page page = make_page();
  HostPages pages(kPage);
  unsigned char* const data = pages.data();
  const Stream stream = make_stream();
  ASSERT_EQ(cu().cuMemHostRegister_v2(data, kPage, 1), 0);
  Gate gate;
  hold(gate, stream);
  ASSERT_EQ(cu().cuMemcpyHtoDAsync_v2(page.address, data, kPage, stream), 0);
  pages.drop();
  gate.open();
  EXPECT_EQ(cu().cuStreamSynchronize(stream), kIllegalAddress);
  const std::string report = expect_report("free under pending work");
  EXPECT_NE(report.find("munmap"), std::string::npos) << report;
  expect_context_failed();
  EXPECT_EQ(cu().cuMemHostUnregister(data), 0);
  drop_page(page);
}

TEST_F(SimgpuSanitizer, WaitOnAnEventNeverRecorded) {
  const Stream stream = make_stream();
  const Event event = make_event();
  EXPECT_EQ(cu().cuStreamWaitEvent(stream, event, 0), 0);
  expect_report("wait on an event never recorded");
}

TEST_F(SimgpuSanitizer, DoubleFreesAndInvalidHandles) {
  Stream stream = nullptr;
  Event event = nullptr;
  ASSERT_EQ(cu().cuStreamCreateWithPriority(&stream, 1, 0), 0);
  ASSERT_EQ(cu().cuEventCreate(&event, 2), 0);
  ASSERT_EQ(cu().cuStreamDestroy_v2(stream), 0);
  EXPECT_EQ(cu().cuStreamDestroy_v2(stream), kInvalidHandle);
  expect_report("double free");
  EXPECT_EQ(cu().cuEventRecord(event, stream), kInvalidHandle);
  expect_report("invalid handle");
  ASSERT_EQ(cu().cuEventDestroy_v2(event), 0);
  EXPECT_EQ(cu().cuEventDestroy_v2(event), kInvalidHandle);
  expect_report("double free");
  EXPECT_EQ(cu().cuEventQuery(&event), kInvalidHandle);
  expect_report("invalid handle");
  Pointer address = 0;
  ASSERT_EQ(cu().cuMemAlloc_v2(&address, 1), 0);
  EXPECT_EQ(cu().cuMemFree_v2(address + 1), kInvalidValue);
  expect_report("invalid handle");
  ASSERT_EQ(cu().cuMemFree_v2(address), 0);
  EXPECT_EQ(cu().cuMemFree_v2(address), kInvalidValue);
  expect_report("double free");
  const Page page = make_page();
  drop_page(page);
  EXPECT_EQ(cu().cuMemRelease(page.handle), kInvalidValue);
  expect_report("double free");
  EXPECT_EQ(cu().cuMemRelease(1), kInvalidValue);
  expect_report("invalid handle");
}

TEST_F(SimgpuSanitizer, AHostFunctionMayNotCallTheApi) {
  int code = 0;
  const Stream stream = make_stream();
  queue([this, &code] { code = cu().cuStreamSynchronize(nullptr); }, stream);
  ASSERT_EQ(cu().cuStreamSynchronize(stream), 0);
  EXPECT_EQ(code, kNotPermitted);
  expect_report("API call in a host function");
}

TEST_F(SimgpuSanitizer, TheNthCallFailsWithACodeThatFits) {
  const Properties properties;
  unsigned long long handle = 0;
  sim().fail("cuMemCreate", 2, 0, 0, "");
  sim().fail("cuEventCreate", 1, 0, 0, "");
  ASSERT_EQ(cu().cuMemCreate(&handle, kPage, &properties, 0), 0);
  unsigned long long refused = 0;
  EXPECT_EQ(cu().cuMemCreate(&refused, kPage, &properties, 0), kOutOfMemory);
  EXPECT_EQ(cu().cuMemRelease(handle), 0);
  ASSERT_EQ(cu().cuMemCreate(&handle, kPage, &properties, 0), 0) << "once";
  EXPECT_EQ(cu().cuMemRelease(handle), 0);
  Event event = nullptr;
  EXPECT_EQ(cu().cuEventCreate(&event, 2), kUnknown);
  sim().fail("cuCtxSynchronize", 1, 46, 0, "");
  EXPECT_EQ(cu().cuCtxSynchronize(), 46);
  sim().fail("cuCtxSynchronize", 1, 46, 0, "");
  sim().clear_faults();
  EXPECT_EQ(cu().cuCtxSynchronize(), 0);
}

TEST_F(SimgpuSanitizer, AFaultMayBeMeantForOneLibrary) {
  sim().fail("cuCtxSynchronize", 1, 0, 0, "libtorch");
  EXPECT_EQ(cu().cuCtxSynchronize(), 0);
  sim().fail("cuCtxSynchronize", 1, 0, 0, "native_t");
  EXPECT_EQ(cu().cuCtxSynchronize(), kUnknown);
}

TEST_F(SimgpuSanitizer, AStickyFaultLastsUntilItIsCleared) {
  sim().fail("cuCtxSynchronize", 1, 719, 1, "");
  EXPECT_EQ(cu().cuCtxSynchronize(), 719);
  expect_context_failed(719);
}

}  // namespace
}  // namespace simgpu_test
