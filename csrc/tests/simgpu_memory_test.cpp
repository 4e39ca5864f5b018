// Simulated GPU: physical pages, addresses, plain allocations, host memory.
#include "simgpu_fixture.h"

namespace simgpu_test {
namespace {

class SimgpuMemory : public SimulatedGpu {};

TEST_F(SimgpuMemory, AHandleMappedTwiceShowsTheSameBytesAtBothAddresses) {
  const Page page = make_page();
  Pointer other = 0;
  ASSERT_EQ(cu().cuMemAddressReserve(&other, kPage, 0, 0, 0), 0);
  ASSERT_EQ(cu().cuMemMap(other, kPage, 0, page.handle, 0), 0);
  const Access access;
  ASSERT_EQ(cu().cuMemSetAccess(other, kPage, &access, 1), 0);
  ASSERT_EQ(cu().cuMemsetD8Async(page.address, 0x5A, kPage, nullptr), 0);
  expect_bytes(other, kPage, 0x5A);
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  ASSERT_EQ(cu().cuMemUnmap(other, kPage), 0);
  ASSERT_EQ(cu().cuMemAddressFree(other, kPage), 0);
  expect_bytes(page.address, kPage, 0x5A);
  drop_page(page);
}

TEST_F(SimgpuMemory, AReleasedHandleLivesWhileItIsMapped) {
  const std::uint64_t before = sim().used_bytes(0);
  const Page page = make_page();
  ASSERT_EQ(cu().cuMemRelease(page.handle), 0);
  EXPECT_EQ(sim().used_bytes(0), before + kPage);
  ASSERT_EQ(cu().cuMemsetD8Async(page.address, 7, kPage, nullptr), 0);
  expect_bytes(page.address, kPage, 7);
  ASSERT_EQ(cu().cuMemUnmap(page.address, kPage), 0);
  EXPECT_EQ(sim().used_bytes(0), before);
  ASSERT_EQ(cu().cuMemAddressFree(page.address, kPage), 0);
}

TEST_F(SimgpuMemory, CapacityIsALimitThatCanBeReachedExactly) {
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_EQ(cu().cuMemGetInfo_v2(&free, &total), 0);
  const std::uint64_t used = sim().used_bytes(0);
  sim().set_memory(0, used + 2 * kPage);
  const Properties properties;
  unsigned long long handle = 0;
  unsigned long long refused = 0;
  EXPECT_EQ(cu().cuMemCreate(&refused, 3 * kPage, &properties, 0), kOutOfMemory);
  EXPECT_EQ(cu().cuMemCreate(&handle, 2 * kPage, &properties, 0), 0);
  EXPECT_EQ(cu().cuMemCreate(&refused, kPage, &properties, 0), kOutOfMemory);
  Pointer address = 0;
  EXPECT_EQ(cu().cuMemAlloc_v2(&address, 1), kOutOfMemory);
  ASSERT_EQ(cu().cuMemRelease(handle), 0);
  EXPECT_EQ(cu().cuMemAlloc_v2(&address, 1), 0);
  EXPECT_EQ(cu().cuMemFree_v2(address), 0);
  sim().set_memory(0, total);
}

TEST_F(SimgpuMemory, UsedAndPeakFollowWhatIsCreated) {
  sim().reset_peak(0);
  const std::uint64_t before = sim().used_bytes(0);
  Pointer address = 0;
  ASSERT_EQ(cu().cuMemAlloc_v2(&address, 3 * kPage), 0);
  EXPECT_EQ(sim().used_bytes(0), before + 3 * kPage);
  ASSERT_EQ(cu().cuMemFree_v2(address), 0);
  EXPECT_EQ(sim().used_bytes(0), before);
  EXPECT_EQ(sim().peak_bytes(0), before + 3 * kPage);
  sim().reset_peak(0);
  EXPECT_EQ(sim().peak_bytes(0), before);
}

TEST_F(SimgpuMemory, WhatDoesNotFitThePagesIsRefused) {
  const Properties properties;
  unsigned long long handle = 0;
  EXPECT_EQ(cu().cuMemCreate(&handle, kPage / 2, &properties, 0), kInvalidValue);
  Pointer address = 0;
  EXPECT_EQ(cu().cuMemAddressReserve(&address, kPage + 1, 0, 0, 0), kInvalidValue);
  ASSERT_EQ(cu().cuMemAddressReserve(&address, 2 * kPage, 0, 0, 0), 0);
  EXPECT_EQ(address % kPage, 0);
  ASSERT_EQ(cu().cuMemCreate(&handle, 2 * kPage, &properties, 0), 0);
  EXPECT_EQ(cu().cuMemMap(address, kPage, kPage, handle, 0), kInvalidValue) << "an offset";
  EXPECT_EQ(cu().cuMemMap(address + kPage, 2 * kPage, 0, handle, 0), kInvalidValue) << "beyond";
  ASSERT_EQ(cu().cuMemMap(address, 2 * kPage, 0, handle, 0), 0);
  EXPECT_EQ(cu().cuMemMap(address, 2 * kPage, 0, handle, 0), kInvalidValue) << "mapped already";
  EXPECT_EQ(cu().cuMemAddressFree(address, kPage), kInvalidValue) << "not as it was reserved";
  ASSERT_EQ(cu().cuMemUnmap(address, 2 * kPage), 0);
  EXPECT_EQ(cu().cuMemUnmap(address, 2 * kPage), kInvalidValue) << "not mapped any more";
  const Access access;
  EXPECT_EQ(cu().cuMemSetAccess(address, kPage, &access, 1), kInvalidValue) << "not mapped";
  ASSERT_EQ(cu().cuMemRelease(handle), 0);
  ASSERT_EQ(cu().cuMemAddressFree(address, 2 * kPage), 0);
}

TEST_F(SimgpuMemory, ManyMappingsAreUnmappedWithOneCall) {
  Pointer address = 0;
  ASSERT_EQ(cu().cuMemAddressReserve(&address, 2 * kPage, 0, 0, 0), 0);
  const Properties properties;
  for (std::size_t i = 0; i < 2; ++i) {
    unsigned long long handle = 0;
    ASSERT_EQ(cu().cuMemCreate(&handle, kPage, &properties, 0), 0);
    ASSERT_EQ(cu().cuMemMap(address + i * kPage, kPage, 0, handle, 0), 0);
    ASSERT_EQ(cu().cuMemRelease(handle), 0);
  }
  const Access access;
  ASSERT_EQ(cu().cuMemSetAccess(address, 2 * kPage, &access, 1), 0);
  ASSERT_EQ(cu().cuMemsetD8Async(address + kPage / 2, 9, kPage, nullptr), 0);
  expect_bytes(address + kPage / 2, kPage, 9);
  ASSERT_EQ(cu().cuMemUnmap(address, 2 * kPage), 0);
  ASSERT_EQ(cu().cuMemAddressFree(address, 2 * kPage), 0);
}

TEST_F(SimgpuMemory, FreshMemoryIsNaNWithPoison) {
  sim().set_adversary(0, 0, 1);
  Page page = make_page();
  expect_bytes(page.address, kPage, 0xFF);
  ASSERT_EQ(cu().cuMemsetD8Async(page.address, 1, kPage, nullptr), 0);
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  drop_page(page);
}

TEST_F(SimgpuMemory, UnmappedMemoryIsNaNWithPoisonOnceNoMappingIsLeft) {
  sim().set_adversary(0, 0, 1);
  const Page page = make_page();
  Pointer other = 0;
  ASSERT_EQ(cu().cuMemAddressReserve(&other, kPage, 0, 0, 0), 0);
  ASSERT_EQ(cu().cuMemMap(other, kPage, 0, page.handle, 0), 0);
  const Access access;
  ASSERT_EQ(cu().cuMemSetAccess(other, kPage, &access, 1), 0);
  ASSERT_EQ(cu().cuMemsetD8Async(other, 1, kPage, nullptr), 0);
  ASSERT_EQ(cu().cuCtxSynchronize(), 0);
  ASSERT_EQ(cu().cuMemUnmap(other, kPage), 0);
  expect_bytes(page.address, kPage, 1);
  ASSERT_EQ(cu().cuMemUnmap(page.address, kPage), 0);
  ASSERT_EQ(cu().cuMemMap(page.address, kPage, 0, page.handle, 0), 0);
  ASSERT_EQ(cu().cuMemSetAccess(page.address, kPage, &access, 1), 0);
  expect_bytes(page.address, kPage, 0xFF);
  ASSERT_EQ(cu().cuMemAddressFree(other, kPage), 0);
  drop_page(page);
}

TEST_F(SimgpuMemory, FreeWaitsForTheDevice) {
  Pointer address = 0;
  ASSERT_EQ(cu().cuMemAlloc_v2(&address, kPage), 0);
  const Stream stream = make_stream();
  bool done = false;
  ASSERT_EQ(cu().cuMemsetD8Async(address, 1, kPage, stream), 0);
  queue([&done] { done = true; }, stream);
  ASSERT_EQ(cu().cuMemFree_v2(address), 0);
  EXPECT_TRUE(done);
}

TEST_F(SimgpuMemory, HostMemoryIsRegisteredOnce) {
  HostPages pages(2 * kPage);
  ASSERT_EQ(cu().cuMemHostRegister_v2(pages.data(), 2 * kPage, 1), 0);
  EXPECT_EQ(cu().cuMemHostRegister_v2(pages.data() + kPage, kPage, 1), kAlreadyRegistered);
  EXPECT_EQ(cu().cuMemHostUnregister(pages.data() + kPage), kNotRegistered);
  ASSERT_EQ(cu().cuMemHostUnregister(pages.data()), 0);
  EXPECT_EQ(cu().cuMemHostUnregister(pages.data()), kNotRegistered);
  ASSERT_EQ(cu().cuMemHostRegister_v2(pages.data() + kPage, kPage, 1), 0);
  ASSERT_EQ(cu().cuMemHostUnregister(pages.data() + kPage), 0);
}

TEST_F(SimgpuMemory, MemoryThatIsNotThereCannotBeRegistered) {
  HostPages pages(kPage);
  unsigned char* const gone = pages.data();
  pages.drop();
  EXPECT_EQ(cu().cuMemHostRegister_v2(gone, kPage, 1), kInvalidValue);
}

TEST_F(SimgpuMemory, APointerSaysWhatItIs) {
  constexpr int kMemoryType = 2, kOrdinal = 9;
  const Page page = make_page();
  unsigned type = 0;
  int ordinal = -1;
  EXPECT_EQ(cu().cuPointerGetAttribute(&type, kMemoryType, page.address + 5), 0);
  EXPECT_EQ(type, 2U) << "device";
  EXPECT_EQ(cu().cuPointerGetAttribute(&ordinal, kOrdinal, page.address + 5), 0);
  EXPECT_EQ(ordinal, 0);
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, 100, 0), 0);
  EXPECT_EQ(cu().cuPointerGetAttribute(&type, kMemoryType, reinterpret_cast<Pointer>(pinned)), 0);
  EXPECT_EQ(type, 1U) << "host";
  const Pointer plain = reinterpret_cast<Pointer>(&type);
  EXPECT_EQ(cu().cuPointerGetAttribute(&type, kMemoryType, plain), kInvalidValue);
  ASSERT_EQ(cu().cuMemFreeHost(pinned), 0);
  drop_page(page);
}

TEST_F(SimgpuMemory, LivingObjectsAreCountedByTheLibraryThatMadeThem) {
  const Page page = make_page();
  void* pinned = nullptr;
  ASSERT_EQ(cu().cuMemHostAlloc(&pinned, 100, 0), 0);
  EXPECT_EQ(holdings(),
            "native_tests\": {\"handles\": 1, \"mapped_bytes\": 2097152, \"reservations\": 1, "
            "\"allocations\": 0, \"streams\": 0, \"events\": 0, \"pinned_bytes\": 100");
  ASSERT_EQ(cu().cuMemFreeHost(pinned), 0);
  drop_page(page);
  EXPECT_EQ(holdings(), "");
}

TEST_F(SimgpuMemory, AnotherDevicesMemoryIsCopiedButNotTouchedByKernels) {
  if (device_count() < 2) GTEST_SKIP() << "needs TRAE_MEM_SIM=devices=2";
  const Page here = make_page(0);
  const Page there = make_page(1);
  ASSERT_EQ(cu().cuMemsetD8Async(here.address, 3, kPage, nullptr), 0);
  ASSERT_EQ(cu().cuMemcpyDtoDAsync_v2(there.address, here.address, kPage, nullptr), 0);
  expect_bytes(there.address, kPage, 3);
  const simgpu_range touched{reinterpret_cast<void*>(there.address), kPage, 1};
  EXPECT_EQ(sim().launch(nullptr, "kernel", nullptr, nullptr, nullptr, &touched, 1), 0);
  EXPECT_EQ(cu().cuCtxSynchronize(), kIllegalAddress);
  expect_report("missing set-access");
  sim().clear_faults();
  drop_page(here);
  drop_page(there);
}

}  // namespace
}  // namespace simgpu_test
