#include "core/event_log.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

LogEntry entry(std::uint32_t unit) { return {EventKind::kLoad, unit, 0, 8, unit, unit + 1}; }

std::vector<std::uint32_t> units(const EventLog::Batch& batch) {
  std::vector<std::uint32_t> result;
  for (const LogEntry& read : batch.entries) result.push_back(read.unit);
  return result;
}

TEST(EventLogTest, KeepsEntriesAsTheyWereAdded) {
  EventLog log(4);
  log.add({EventKind::kStall, 3, 2, 0, 100, 250});
  const EventLog::Batch batch = log.read(0);
  ASSERT_EQ(batch.entries.size(), 1U);
  EXPECT_EQ(batch.entries[0].kind, EventKind::kStall);
  EXPECT_EQ(batch.entries[0].unit, 3U);
  EXPECT_EQ(batch.entries[0].slot, 2U);
  EXPECT_EQ(batch.entries[0].bytes, 0U);
  EXPECT_EQ(batch.entries[0].begin_ns, 100);
  EXPECT_EQ(batch.entries[0].end_ns, 250);
}

TEST(EventLogTest, ReadsOnWhereItStopped) {
  EventLog log(10);
  EXPECT_TRUE(log.read(0).entries.empty());
  for (std::uint32_t unit = 0; unit < 3; ++unit) log.add(entry(unit));
  const EventLog::Batch first = log.read(0);
  EXPECT_EQ(units(first), (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(first.next, 3U);
  EXPECT_TRUE(log.read(first.next).entries.empty());
  log.add(entry(3));
  EXPECT_EQ(units(log.read(first.next)), (std::vector<std::uint32_t>{3}));
}

TEST(EventLogTest, OverwritesTheOldestAndCountsWhatAReaderLost) {
  EventLog log(4);
  for (std::uint32_t unit = 0; unit < 11; ++unit) {
    log.add(entry(unit));
    log.check_invariants();
  }
  const EventLog::Batch batch = log.read(5);
  EXPECT_EQ(units(batch), (std::vector<std::uint32_t>{7, 8, 9, 10}));
  EXPECT_EQ(batch.lost, 2U);
  EXPECT_EQ(batch.next, 11U);
  EXPECT_EQ(log.read(9).lost, 0U);
  EXPECT_EQ(units(log.read(9)), (std::vector<std::uint32_t>{9, 10}));
}

TEST(EventLogTest, AReaderFromTheFutureGetsNothing) {
  EventLog log(4);
  log.add(entry(0));
  const EventLog::Batch batch = log.read(1000);
  EXPECT_TRUE(batch.entries.empty());
  EXPECT_EQ(batch.lost, 0U);
  EXPECT_EQ(batch.next, 1U);
}

TEST(EventLogTest, MustKeepAtLeastOneEntry) { EXPECT_THROW(EventLog(0), InvalidArgument); }

TEST(EventLogTest, ManyWritersAndAReaderLoseNothingSilently) {
  constexpr std::uint64_t kWriters = 3;
  constexpr std::uint32_t kEach = 2000;
  EventLog log(64);
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&log] {
      for (std::uint32_t i = 0; i < kEach; ++i) log.add(entry(i));
    });
  }
  std::uint64_t next = 0;
  std::uint64_t seen = 0;
  while (seen < kWriters * kEach) {
    const EventLog::Batch batch = log.read(next);
    EXPECT_EQ(next + batch.lost + batch.entries.size(), batch.next);
    for (const LogEntry& read : batch.entries) EXPECT_EQ(read.end_ns, read.begin_ns + 1);
    seen += batch.lost + batch.entries.size();
    next = batch.next;
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(seen, kWriters * kEach);
  log.check_invariants();
}

TEST(EventLogTest, ItsClockNeverGoesBack) {
  const std::int64_t before = now_ns();
  EXPECT_GE(now_ns(), before);
}

}  // namespace
}  // namespace trae_mem::test
