#include "core/page_pool.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "core/error.h"
#include "core/host_device.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

class PagePoolTest : public ::testing::Test {
 protected:
  void make_pool(std::size_t limit_bytes, const std::string& faults = "") {
    device_ = std::make_shared<HostDevice>(
        HostDeviceOptions{.memory_bytes = 8 * kPageBytes, .faults = faults});
    pool_ = std::make_shared<PagePool>(device_, limit_bytes);
  }
  void SetUp() override { make_pool(0); }
  void TearDown() override {
    pool_->check_invariants();
    pool_.reset();
    device_->check_invariants();
    EXPECT_EQ(device_->info().used_bytes, 0U) << "pages were leaked";
  }

  std::shared_ptr<HostDevice> device_;
  std::shared_ptr<PagePool> pool_;
};

TEST_F(PagePoolTest, TakesWholePages) {
  EXPECT_EQ(pool_->take(0).pages().size(), 0U);
  EXPECT_EQ(pool_->take(1).pages().size(), 1U);
  EXPECT_EQ(pool_->take(kPageBytes).pages().size(), 1U);
  EXPECT_EQ(pool_->take(kPageBytes + 1).pages().size(), 2U);
}

TEST_F(PagePoolTest, EveryPageHasOneHolder) {
  const PageList first = pool_->take(3 * kPageBytes);
  const PageList second = pool_->take(4 * kPageBytes);
  std::set<PageHandle> pages(first.pages().begin(), first.pages().end());
  pages.insert(second.pages().begin(), second.pages().end());
  EXPECT_EQ(pages.size(), 7U);
  EXPECT_EQ(pool_->used_bytes(), 7 * kPageBytes);
  pool_->check_invariants();  // there is room to take all of them back
}

TEST_F(PagePoolTest, PagesComeBackWithTheirHolderAndServeTheNextTaker) {
  std::set<PageHandle> before;
  {
    const PageList pages = pool_->take(5 * kPageBytes);
    before.insert(pages.pages().begin(), pages.pages().end());
  }
  EXPECT_EQ(pool_->used_bytes(), 0U);
  EXPECT_EQ(pool_->free_bytes(), 5 * kPageBytes);
  pool_->check_invariants();
  const PageList again = pool_->take(5 * kPageBytes);
  EXPECT_EQ(std::set<PageHandle>(again.pages().begin(), again.pages().end()), before);
  EXPECT_EQ(device_->info().used_bytes, 5 * kPageBytes);
}

TEST_F(PagePoolTest, AMovedListGivesItsPagesBackOnce) {
  std::optional<PageList> outer;
  {
    PageList inner = pool_->take(2 * kPageBytes);
    outer.emplace(std::move(inner));
  }
  EXPECT_EQ(pool_->used_bytes(), 2 * kPageBytes);
  outer.reset();
  EXPECT_EQ(pool_->used_bytes(), 0U);
  EXPECT_EQ(pool_->free_bytes(), 2 * kPageBytes);
}

TEST_F(PagePoolTest, TrimGivesTheFreePagesToTheDevice) {
  const PageList held = pool_->take(kPageBytes);
  static_cast<void>(pool_->take(3 * kPageBytes));
  pool_->trim();
  EXPECT_EQ(pool_->free_bytes(), 0U);
  EXPECT_EQ(device_->info().used_bytes, kPageBytes);
}

TEST_F(PagePoolTest, ListsKeepTheirPoolAlive) {
  std::optional<PageList> pages(pool_->take(kPageBytes));
  const std::weak_ptr<PagePool> watched = pool_;
  pool_ = std::make_shared<PagePool>(device_);
  EXPECT_FALSE(watched.expired());
  pages.reset();
  EXPECT_TRUE(watched.expired());
}

TEST_F(PagePoolTest, RefusesBeyondItsLimitUntilPagesComeBack) {
  make_pool(3 * kPageBytes + 100);  // a part of a page does not count
  std::optional<PageList> two(pool_->take(2 * kPageBytes));
  const std::string message =
      message_of<OutOfMemory>([&] { static_cast<void>(pool_->take(2 * kPageBytes)); });
  EXPECT_NE(message.find("no room for 4.00 MiB: 4.00 MiB of 6.00 MiB in use"), std::string::npos)
      << message;
  EXPECT_EQ(pool_->take(kPageBytes).pages().size(), 1U);
  two.reset();
  EXPECT_EQ(pool_->take(3 * kPageBytes).pages().size(), 3U);
  EXPECT_EQ(device_->info().used_bytes, 3 * kPageBytes);
}

TEST_F(PagePoolTest, ADeviceThatIsOutOfMemoryLeavesThePoolWhole) {
  const PageList held = pool_->take(6 * kPageBytes);
  EXPECT_THROW(static_cast<void>(pool_->take(3 * kPageBytes)), OutOfMemory);
  EXPECT_EQ(pool_->used_bytes(), 6 * kPageBytes);
  EXPECT_EQ(pool_->free_bytes(), 2 * kPageBytes);  // created before the device refused
  pool_->check_invariants();
  EXPECT_EQ(pool_->take(2 * kPageBytes).pages().size(), 2U);
}

TEST_F(PagePoolTest, ACreateThatFailsKeepsThePagesThatWereCreated) {
  make_pool(0, "create:3");
  EXPECT_THROW(static_cast<void>(pool_->take(4 * kPageBytes)), DeviceError);
  EXPECT_EQ(pool_->used_bytes(), 0U);
  EXPECT_EQ(pool_->free_bytes(), 2 * kPageBytes);
  EXPECT_EQ(pool_->take(4 * kPageBytes).pages().size(), 4U);
}

TEST_F(PagePoolTest, TakersInManyThreadsNeverShareAPage) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::set<PageHandle> held;  // by all threads together
  bool shared = false;
  for (std::size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t round = 0; round < 200; ++round) {
        const PageList pages = pool_->take((1 + (thread + round) % 2) * kPageBytes);
        {
          const std::lock_guard lock(mutex);
          for (const PageHandle page : pages.pages()) shared |= !held.insert(page).second;
        }
        const std::lock_guard lock(mutex);
        for (const PageHandle page : pages.pages()) held.erase(page);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(shared);
  EXPECT_EQ(pool_->used_bytes(), 0U);
  EXPECT_LE(pool_->free_bytes(), 8 * kPageBytes);
}

}  // namespace
}  // namespace trae_mem::test
