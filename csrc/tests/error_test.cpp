#include "core/error.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace trae_mem::test {
namespace {

TEST(ErrorTest, BytesHaveTwoDecimalsAboveAKibibyte) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(std::size_t{7} << 20), "7.00 MiB");
  EXPECT_EQ(format_bytes((std::size_t{5} << 30) / 4), "1.25 GiB");
  EXPECT_EQ(format_bytes(std::size_t{3} << 40), "3.00 TiB");
}

TEST(ErrorTest, SizesBeyondTheLargestUnitKeepThatUnit) {
  EXPECT_EQ(format_bytes(std::size_t{2048} << 40), "2048.00 TiB");
}

TEST(ErrorTest, TheSystemsReasonFollowsTheText) {
  errno = ENOENT;
  EXPECT_EQ(with_errno("cannot open 'a'"), "cannot open 'a': No such file or directory");
}

TEST(ErrorTest, OneCatchGetsThemAll) {
  EXPECT_THROW(throw InvalidArgument("a"), Error);
  EXPECT_THROW(throw OutOfMemory("a"), Error);
  EXPECT_THROW(throw DeviceError("a"), Error);
  EXPECT_THROW(throw FileError("a"), Error);
}

}  // namespace
}  // namespace trae_mem::test
