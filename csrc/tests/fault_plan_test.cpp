#include "core/fault_plan.h"

#include <gtest/gtest.h>

#include <atomic>

#include "core/error.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

// Which of the first `calls` calls of the operation fail, counted from 1.
std::vector<int> failures(FaultPlan& plan, const std::string& operation, int calls) {
  std::vector<int> failed;
  for (int call = 1; call <= calls; ++call) {
    try {
      plan.check(operation);
    } catch (const DeviceError&) {
      failed.push_back(call);
    }
  }
  return failed;
}

TEST(FaultPlanTest, AnEmptyPlanFailsNothing) {
  FaultPlan plan("");
  EXPECT_TRUE(failures(plan, "copy", 10).empty());
}

TEST(FaultPlanTest, ThePlannedCallFailsAndNoOther) {
  FaultPlan plan("copy:3");
  EXPECT_EQ(failures(plan, "copy", 10), std::vector<int>{3});
}

TEST(FaultPlanTest, OperationsAreCountedApart) {
  FaultPlan plan("copy:2,map:1");
  EXPECT_TRUE(failures(plan, "reserve", 5).empty());
  EXPECT_EQ(failures(plan, "copy", 5), std::vector<int>{2});
  EXPECT_EQ(failures(plan, "map", 5), std::vector<int>{1});
}

TEST(FaultPlanTest, OneOperationMayFailMoreThanOnce) {
  FaultPlan plan("copy:4,copy:2,copy:2");
  EXPECT_EQ(failures(plan, "copy", 6), (std::vector<int>{2, 4}));
}

TEST(FaultPlanTest, TheMessageNamesTheOperationAndTheCall) {
  FaultPlan plan("create:1");
  EXPECT_EQ(message_of<DeviceError>([&plan] { plan.check("create"); }),
            "injected fault: create number 1");
}

TEST(FaultPlanTest, WhatIsNotAPlanIsRefused) {
  for (const char* text : {"copy", "copy:", "copy:0", "copy:-1", "copy:x", "copy:3x", "copy: 3",
                           ":3", "copy:1,,map:1", "copy:1 map:2", "copy:99999999999999999999"}) {
    EXPECT_THROW(FaultPlan{text}, InvalidArgument) << text;
  }
}

TEST(FaultPlanTest, OfManyThreadsExactlyOneMeetsTheFault) {
  FaultPlan plan("copy:250");
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] { failed += static_cast<int>(failures(plan, "copy", 100).size()); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 1);
}

}  // namespace
}  // namespace trae_mem::test
