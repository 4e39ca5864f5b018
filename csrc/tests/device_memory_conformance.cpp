// Addresses, physical pages, mappings, and the bytes in them.
#include <array>
#include <limits>

#include "device_conformance.h"

namespace trae_mem::test {
namespace {

constexpr std::size_t kPage = kPageBytes;
constexpr std::size_t kBeyondAll = std::numeric_limits<std::size_t>::max() / kPage * kPage;

TEST_P(DeviceConformance, ReservationsAreAlignedAndDisjoint) {
  const AddressRange first(device_, 3 * kPage);
  const AddressRange second(device_, kPage);
  EXPECT_EQ(first.begin() % kPage, 0U);
  EXPECT_EQ(second.begin() % kPage, 0U);
  EXPECT_TRUE(second.begin() >= first.begin() + 3 * kPage ||
              first.begin() >= second.begin() + kPage);
}

TEST_P(DeviceConformance, AddressesCostNoMemory) {
  const AddressRange range(device_, 1024 * kPage);  // far more than the device has
  EXPECT_EQ(device_->info().used_bytes, 0U);
}

TEST_P(DeviceConformance, SizesAreWholePages) {
  EXPECT_THROW(device_->reserve(0), InvalidArgument);
  EXPECT_THROW(device_->reserve(kPage + 4096), InvalidArgument);
  EXPECT_THROW(static_cast<void>(device_->create(0)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(device_->create(kPage / 2)), InvalidArgument);
  const AddressRange range(device_, 2 * kPage);
  const Pages pages(device_, kPage);
  EXPECT_THROW(device_->map(range.begin() + 4096, kPage, pages.handle()), InvalidArgument);
  EXPECT_THROW(device_->map(range.begin(), 0, pages.handle()), InvalidArgument);
}

TEST_P(DeviceConformance, OneHandleAtTwoAddressesIsOneMemory) {
  const Pages pages(device_, 2 * kPage);
  const auto first = mapped(2 * kPage, pages.handle());
  const auto second = mapped(2 * kPage, pages.handle());
  const auto bytes = test_bytes(2 * kPage, 1);
  write(first->begin(), bytes);
  EXPECT_EQ(read(second->begin(), bytes.size()), bytes);
  const auto other = test_bytes(5000, 2);
  write(second->begin() + kPage - 1, other);
  EXPECT_EQ(read(first->begin() + kPage - 1, other.size()), other);
}

TEST_P(DeviceConformance, HandlesShareNoByte) {
  const Pages one(device_, kPage);
  const Pages two(device_, kPage);
  const auto first = mapped(kPage, one.handle());
  const auto second = mapped(kPage, two.handle());
  const auto bytes = test_bytes(kPage, 1);
  write(first->begin(), bytes);
  write(second->begin(), test_bytes(kPage, 2));
  EXPECT_EQ(read(first->begin(), kPage), bytes);
}

TEST_P(DeviceConformance, BytesStayWithTheHandleNotWithTheAddress) {
  const Pages pages(device_, kPage);
  const auto bytes = test_bytes(kPage, 3);
  {
    const auto range = mapped(kPage, pages.handle());
    write(range->begin(), bytes);
  }
  const auto elsewhere = mapped(kPage, pages.handle());
  EXPECT_EQ(read(elsewhere->begin(), kPage), bytes);
}

TEST_P(DeviceConformance, UsedBytesFollowCreateAndRelease) {
  Pages one(device_, kPage);
  EXPECT_EQ(device_->info().used_bytes, kPage);
  Pages two(device_, 3 * kPage);
  EXPECT_EQ(device_->info().used_bytes, 4 * kPage);
  one.release();
  EXPECT_EQ(device_->info().used_bytes, 3 * kPage);
  two.release();
  EXPECT_EQ(device_->info().used_bytes, 0U);
}

TEST_P(DeviceConformance, AReleasedHandleLivesWhileItIsMapped) {
  Pages pages(device_, kPage);
  auto first = mapped(kPage, pages.handle());
  auto second = mapped(kPage, pages.handle());
  const auto bytes = test_bytes(kPage, 4);
  write(first->begin(), bytes);
  pages.release();
  first.reset();
  EXPECT_EQ(device_->info().used_bytes, kPage);
  const Pages another(device_, kPage);  // must not get the living page
  const auto third = mapped(kPage, another.handle());
  write(third->begin(), test_bytes(kPage, 5));
  EXPECT_EQ(read(second->begin(), kPage), bytes);
  second.reset();
  EXPECT_EQ(device_->info().used_bytes, kPage);  // the other handle's
}

TEST_P(DeviceConformance, AReleasedHandleIsNoHandle) {
  Pages pages(device_, kPage);
  pages.release();
  EXPECT_THROW(device_->release(pages.handle()), InvalidArgument);
  const AddressRange range(device_, kPage);
  EXPECT_THROW(device_->map(range.begin(), kPage, pages.handle()), InvalidArgument);
}

TEST_P(DeviceConformance, MapRefusesAddressesThatAreNotReserved) {
  const Pages pages(device_, kPage);
  Address freed = 0;
  {
    const AddressRange range(device_, kPage);
    freed = range.begin();
  }
  EXPECT_THROW(device_->map(freed, kPage, pages.handle()), InvalidArgument);
}

TEST_P(DeviceConformance, MapRefusesToReachBeyondAReservation) {
  const Pages pages(device_, 2 * kPage);
  const AddressRange range(device_, 2 * kPage);
  EXPECT_THROW(device_->map(range.begin() + kPage, 2 * kPage, pages.handle()), InvalidArgument);
}

TEST_P(DeviceConformance, MapRefusesWhereSomethingIsMapped) {
  const Pages small(device_, kPage);
  const Pages large(device_, 2 * kPage);
  AddressRange range(device_, 4 * kPage);
  range.map(kPage, kPage, small.handle());
  for (const std::size_t offset : {std::size_t{0}, kPage}) {
    EXPECT_THROW(device_->map(range.begin() + offset, 2 * kPage, large.handle()), InvalidArgument);
  }
  range.map(2 * kPage, 2 * kPage, large.handle());
  EXPECT_THROW(device_->map(range.begin() + 3 * kPage, kPage, small.handle()), InvalidArgument);
  range.map(0, kPage, small.handle());  // a gap of the right size
}

TEST_P(DeviceConformance, MapRefusesAPartOfAHandle) {
  const Pages pages(device_, 2 * kPage);
  const AddressRange range(device_, 4 * kPage);
  EXPECT_THROW(device_->map(range.begin(), kPage, pages.handle()), InvalidArgument);
  EXPECT_THROW(device_->map(range.begin(), 4 * kPage, pages.handle()), InvalidArgument);
}

TEST_P(DeviceConformance, OnlyWholeMappingsAreUnmapped) {
  const Pages pages(device_, 2 * kPage);
  const AddressRange range(device_, 6 * kPage);
  const Address begin = range.begin();
  device_->map(begin, 2 * kPage, pages.handle());
  device_->map(begin + 4 * kPage, 2 * kPage, pages.handle());
  EXPECT_THROW(device_->unmap(begin, kPage), InvalidArgument);
  EXPECT_THROW(device_->unmap(begin + kPage, kPage), InvalidArgument);
  EXPECT_THROW(device_->unmap(begin, 6 * kPage), InvalidArgument);  // nothing in the middle
  EXPECT_THROW(device_->unmap(begin + 2 * kPage, 2 * kPage), InvalidArgument);
  const auto bytes = test_bytes(2 * kPage, 6);
  write(begin, bytes);
  EXPECT_EQ(read(begin + 4 * kPage, bytes.size()), bytes);  // refusals changed nothing
  device_->unmap(begin, 2 * kPage);
  EXPECT_THROW(device_->unmap(begin, 2 * kPage), InvalidArgument);
  device_->unmap(begin + 4 * kPage, 2 * kPage);
}

TEST_P(DeviceConformance, NeighbouringMappingsAreUnmappedWithOneCall) {
  const Pages small(device_, kPage);
  const Pages large(device_, 2 * kPage);
  const AddressRange range(device_, 3 * kPage);
  device_->map(range.begin(), kPage, small.handle());
  device_->map(range.begin() + kPage, 2 * kPage, large.handle());
  EXPECT_THROW(device_->unmap(range.begin(), 2 * kPage), InvalidArgument);  // half of the second
  device_->unmap(range.begin(), 3 * kPage);
  device_->map(range.begin(), 2 * kPage, large.handle());  // the addresses are free again
  device_->unmap(range.begin(), 2 * kPage);
}

TEST_P(DeviceConformance, OnlyWholeAndEmptyReservationsAreFreed) {
  const Pages pages(device_, kPage);
  const Address address = device_->reserve(2 * kPage);
  EXPECT_THROW(device_->free_addresses(address, kPage), InvalidArgument);
  EXPECT_THROW(device_->free_addresses(address + kPage, kPage), InvalidArgument);
  device_->map(address + kPage, kPage, pages.handle());
  EXPECT_THROW(device_->free_addresses(address, 2 * kPage), InvalidArgument);
  device_->unmap(address + kPage, kPage);
  device_->free_addresses(address, 2 * kPage);
  EXPECT_THROW(device_->free_addresses(address, 2 * kPage), InvalidArgument);
}

TEST_P(DeviceConformance, BeyondItsCapacityADeviceIsOutOfMemoryUntilSomethingIsReleased) {
  make_device({.memory_bytes = 4 * kPage});
  EXPECT_EQ(device_->info().total_bytes, 4 * kPage);
  Pages first(device_, 3 * kPage);
  EXPECT_THROW(static_cast<void>(device_->create(2 * kPage)), OutOfMemory);
  EXPECT_EQ(device_->info().used_bytes, 3 * kPage);
  const Pages last(device_, kPage);
  EXPECT_THROW(static_cast<void>(device_->create(kPage)), OutOfMemory);
  first.release();
  const Pages again(device_, 3 * kPage);
  EXPECT_EQ(device_->info().used_bytes, 4 * kPage);
}

TEST_P(DeviceConformance, RoomThatManySmallHandlesLeftServesALargeOne) {
  make_device({.memory_bytes = 4 * kPage});
  for (const std::array<std::size_t, 4>& order :
       {std::array<std::size_t, 4>{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 1, 0, 3}, {1, 3, 0, 2}}) {
    std::vector<std::unique_ptr<Pages>> small;
    for (int i = 0; i < 4; ++i) small.push_back(std::make_unique<Pages>(device_, kPage));
    for (const std::size_t i : order) small[i].reset();
    const Pages large(device_, 4 * kPage);
  }
}

TEST_P(DeviceConformance, ASmallHandleThatIsGoneLeavesRoomForTwoLargeOnes) {
  make_device({.memory_bytes = 4 * kPage});
  Pages(device_, kPage).release();
  const Pages first(device_, 2 * kPage);
  const Pages second(device_, 2 * kPage);
  EXPECT_EQ(device_->info().used_bytes, 4 * kPage);
}

TEST_P(DeviceConformance, AnAbsurdSizeIsOutOfMemoryAndDoesNoHarm) {
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  const auto bytes = test_bytes(kPage, 7);
  write(range->begin(), bytes);
  EXPECT_THROW(static_cast<void>(device_->create(kBeyondAll)), OutOfMemory);
  EXPECT_THROW(static_cast<void>(device_->create(kBeyondAll - kPage)), OutOfMemory);
  EXPECT_EQ(device_->info().used_bytes, kPage);
  EXPECT_EQ(read(range->begin(), kPage), bytes);
}

TEST_P(DeviceConformance, HintsKeepTheBytes) {
  const Pages pages(device_, 2 * kPage);
  const auto first = mapped(2 * kPage, pages.handle());
  const auto second = mapped(2 * kPage, pages.handle());
  const auto bytes = test_bytes(2 * kPage, 8);
  write(first->begin(), bytes);
  for (const auto* range : {first.get(), second.get()}) {
    device_->prepare(range->begin() + 256, kPage, probe());
    EXPECT_EQ(read(range->begin(), bytes.size()), bytes);
    device_->rest(range->begin() + 256, kPage, probe());
    EXPECT_EQ(read(range->begin(), bytes.size()), bytes);
  }
}

TEST_P(DeviceConformance, AHostBufferHasExactlyTheSizeAskedFor) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, kPage + 3}) {
    const std::unique_ptr<HostBuffer> buffer = device_->allocate_host(bytes);
    EXPECT_EQ(buffer->bytes(), bytes);
    buffer->data()[0] = std::byte{1};
    buffer->data()[bytes - 1] = std::byte{2};  // the sanitizers and the kernel watch
  }
  EXPECT_EQ(device_->allocate_host(0)->bytes(), 0U);
  EXPECT_EQ(device_->info().used_bytes, 0U);  // it is not the device's memory
}

TEST_P(DeviceConformance, AHostBufferIsCopiedFrom) {
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  const auto bytes = test_bytes(10'007, 9);
  const std::unique_ptr<HostBuffer> buffer = device_->allocate_host(bytes.size());
  std::copy(bytes.begin(), bytes.end(), buffer->data());
  device_->copy_to_device(range->begin() + 1, buffer->data(), buffer->bytes(), probe());
  device_->synchronize(probe());
  EXPECT_EQ(read(range->begin() + 1, bytes.size()), bytes);
}

}  // namespace
}  // namespace trae_mem::test
