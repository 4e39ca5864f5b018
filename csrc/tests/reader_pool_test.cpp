#include "core/reader_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <stdexcept>

#include "test_support.h"

namespace trae_mem::test {
namespace {

using Jobs = std::vector<std::function<void()>>;

TEST(ReaderPoolTest, RunsEveryJobOnceWhateverTheNumberOfThreads) {
  for (const std::size_t threads : {std::size_t{1}, std::size_t{2}, std::size_t{5}}) {
    ReaderPool pool(threads);
    std::vector<std::atomic<int>> ran(100);
    Jobs jobs;
    for (std::atomic<int>& count : ran) jobs.emplace_back([&count] { ++count; });
    pool.run(std::move(jobs));
    for (const std::atomic<int>& count : ran) EXPECT_EQ(count, 1);
  }
}

TEST(ReaderPoolTest, WithoutJobsItReturns) {
  ReaderPool pool(2);
  pool.run({});
}

TEST(ReaderPoolTest, OneThreadIsTheCallersOwn) {
  ReaderPool pool(1);
  std::thread::id ran_in;
  pool.run({[&ran_in] { ran_in = std::this_thread::get_id(); }});
  EXPECT_EQ(ran_in, std::this_thread::get_id());
}

TEST(ReaderPoolTest, JobsRunSideBySide) {
  ReaderPool pool(3);
  std::atomic<int> met = 0;
  const auto meet = [&met] {
    ++met;
    EXPECT_TRUE(eventually([&met] { return met == 3; }));
  };
  pool.run({meet, meet, meet});  // three threads, or nobody ever meets the others
}

TEST(ReaderPoolTest, ReturnsOnlyWhenEveryJobHasEnded) {
  ReaderPool pool(2);
  Gate gate;
  std::atomic<bool> returned = false;
  std::atomic<int> ended = 0;
  std::thread caller([&] {
    // The caller's job ends while the other thread's is held.
    const auto job = [&, caller_id = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == caller_id) {
        EXPECT_TRUE(eventually([&gate] { return gate.reached(); }));
      } else {
        gate.task()();
      }
      ++ended;
    };
    pool.run({job, job});
    returned = true;
  });
  EXPECT_FALSE(happens([&returned] { return returned.load(); }));
  gate.open();
  caller.join();
  EXPECT_EQ(ended, 2);
}

TEST(ReaderPoolTest, ThrowsAFailureAfterTheOtherJobsRan) {
  for (const std::size_t threads : {std::size_t{1}, std::size_t{3}}) {
    ReaderPool pool(threads);
    std::atomic<int> ran = 0;
    Jobs jobs;
    for (int i = 0; i < 20; ++i) {
      jobs.emplace_back([&ran, i] {
        ++ran;
        if (i == 3) throw std::runtime_error("job 3");
      });
    }
    EXPECT_EQ(message_of<std::runtime_error>([&] { pool.run(jobs); }), "job 3");
    EXPECT_EQ(ran, 20);
    EXPECT_EQ(message_of<std::runtime_error>([&] { pool.run(jobs); }), "job 3");  // still works
  }
}

TEST(ReaderPoolTest, TheFirstFailureIsThrown) {
  ReaderPool pool(1);  // one thread: the jobs' order is theirs in the list
  EXPECT_EQ(message_of<std::runtime_error>([&] {
              pool.run({[] { throw std::runtime_error("first"); },
                        [] { throw std::runtime_error("second"); }});
            }),
            "first");
}

TEST(ReaderPoolTest, CallersSideBySideGetTheirOwnJobsAndFailures) {
  ReaderPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> ran = 0;
  std::atomic<int> failed = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round) {
        Jobs jobs(7, [&ran] { ++ran; });
        if (caller == 0) jobs.emplace_back([] { throw std::runtime_error("caller 0"); });
        try {
          pool.run(std::move(jobs));
          EXPECT_NE(caller, 0);
        } catch (const std::runtime_error&) {
          EXPECT_EQ(caller, 0);
          ++failed;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(ran, 4 * 50 * 7);
  EXPECT_EQ(failed, 50);
}

}  // namespace
}  // namespace trae_mem::test
