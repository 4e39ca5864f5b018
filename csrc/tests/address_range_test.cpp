#include "core/address_range.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/host_device.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

class AddressRangeTest : public ::testing::Test {
 protected:
  void TearDown() override { device_->check_invariants(); }

  std::shared_ptr<HostDevice> device_ =
      std::make_shared<HostDevice>(HostDeviceOptions{.memory_bytes = 8 * kPageBytes});
};

TEST_F(AddressRangeTest, RoundsUpToWholePages) {
  EXPECT_EQ(AddressRange(device_, 1).bytes(), kPageBytes);
  EXPECT_EQ(AddressRange(device_, kPageBytes).bytes(), kPageBytes);
  EXPECT_EQ(AddressRange(device_, kPageBytes + 1).bytes(), 2 * kPageBytes);
}

TEST_F(AddressRangeTest, GivesBackItsMappingsAndAddresses) {
  const PageHandle page = device_->create(kPageBytes);
  Address begin = 0;
  {
    AddressRange range(device_, 3 * kPageBytes);
    begin = range.begin();
    range.map(0, kPageBytes, page);
    range.map(2 * kPageBytes, kPageBytes, page);
    range.check_invariants();
  }
  EXPECT_THROW(device_->free_addresses(begin, 3 * kPageBytes), InvalidArgument);
  device_->release(page);
  EXPECT_EQ(device_->info().used_bytes, 0U);  // nothing maps it any more
}

TEST_F(AddressRangeTest, MapsAnewWhereItUnmapped) {
  const PageHandle page = device_->create(kPageBytes);
  {
    AddressRange range(device_, 2 * kPageBytes);
    range.map(kPageBytes, kPageBytes, page);
    range.unmap(kPageBytes);
    range.check_invariants();
    EXPECT_THROW(range.unmap(kPageBytes), InvalidArgument);
    range.map(kPageBytes, kPageBytes, page);
    EXPECT_THROW(range.unmap(0), InvalidArgument);
  }
  device_->release(page);
}

TEST_F(AddressRangeTest, RefusesToMapOutsideOfItself) {
  const PageHandle page = device_->create(kPageBytes);
  {
    AddressRange one(device_, kPageBytes);
    AddressRange two(device_, kPageBytes);
    AddressRange& lower = one.begin() < two.begin() ? one : two;
    AddressRange& upper = one.begin() < two.begin() ? two : one;
    // The device would map there, so the range itself must refuse.
    EXPECT_THROW(lower.map(upper.begin() - lower.begin(), kPageBytes, page), InvalidArgument);
    EXPECT_THROW(lower.map(kPageBytes, kPageBytes, page), InvalidArgument);
    lower.check_invariants();
    upper.check_invariants();
  }
  device_->release(page);
}

TEST_F(AddressRangeTest, AMapThatTheDeviceRefusesLeavesTheRangeAsItWas) {
  device_ = std::make_shared<HostDevice>(
      HostDeviceOptions{.memory_bytes = 8 * kPageBytes, .faults = "map:2"});
  const PageHandle page = device_->create(kPageBytes);
  {
    AddressRange range(device_, 2 * kPageBytes);
    range.map(0, kPageBytes, page);
    EXPECT_THROW(range.map(kPageBytes, kPageBytes, page), DeviceError);
    range.check_invariants();
    EXPECT_THROW(range.unmap(kPageBytes), InvalidArgument);
    range.map(kPageBytes, kPageBytes, page);
  }
  device_->release(page);
  EXPECT_EQ(device_->info().used_bytes, 0U);
}

}  // namespace
}  // namespace trae_mem::test
