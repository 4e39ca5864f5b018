// Loads that fail, calls that a device refuses: the unit concerned says so, the rest goes on.
#include "streamer_fixture.h"

namespace trae_mem::test {
namespace {

class StreamerFailures : public StreamerTest {
 protected:
  // The first load of the unit fails.
  void fail_once(std::size_t unit) {
    const auto failed = std::make_shared<std::atomic<bool>>(false);
    store_->before_loads([unit, failed](std::size_t loaded) {
      if (loaded != unit || failed->exchange(true)) return;
      throw FileError("unit " + std::to_string(unit) + " cannot be read");
    });
  }
  void acquire(std::size_t unit, Travel travel = Travel::kForward) {
    streamer_->acquire(unit, kCallerStream, travel);
  }
  void compute_and_release(std::size_t unit) {
    run_unit(unit, kCallerStream);
    streamer_->release(unit, kCallerStream);
  }
};

// On a GPU only reads of a source fail later than they are queued: from there comes the store.
class StreamerFailureTest : public StreamerFailures,
                            public ::testing::WithParamInterface<StreamerDevice> {
 protected:
  void SetUp() override { choose(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(On, StreamerFailureTest, ::testing::Values(kHost, kGpuFromSource),
                         device_name);

// The calls that fail are those of a HostDevice; for a GPU's see cuda_streamer_test.cpp.
class HostStreamerFailureTest : public StreamerFailures {};

TEST_P(StreamerFailureTest, AcquireThrowsWhatTheLoadThrew) {
  make({.unit_bytes = equal_units(6)});
  fail_once(0);
  EXPECT_EQ(message_of<FileError>([this] { acquire(0); }), "unit 0 cannot be read");
  streamer_->check_invariants();
}

TEST_P(StreamerFailureTest, AfterAFailedLoadTheNextAcquireLoadsAgain) {
  make({.unit_bytes = equal_units(6)});
  fail_once(0);
  EXPECT_THROW(acquire(0), FileError);
  acquire(0);
  compute_and_release(0);
  EXPECT_EQ(finished(), 1);
}

TEST_P(StreamerFailureTest, AUnitWhoseLoadFailedIsNotAcquired) {
  make({.unit_bytes = equal_units(6), .slots = 2, .prefetch = 0});
  fail_once(0);
  EXPECT_THROW(acquire(0), FileError);
  streamer_->invalidate(0);  // refused if it were acquired
  acquire(2);                // the same slot
  compute_and_release(2);
  EXPECT_EQ(finished(), 1);
}

TEST_P(StreamerFailureTest, AFailedLoadIsEvictedInTheLog) {
  make({.unit_bytes = equal_units(1)});
  fail_once(0);
  EXPECT_THROW(acquire(0), FileError);
  streamer_->drain();
  ASSERT_FALSE(log().empty());
  EXPECT_EQ(log().back().kind, EventKind::kEvict);
  EXPECT_EQ(streamer_->stats().acquires, 1U);
  EXPECT_EQ(streamer_->stats().hits + streamer_->stats().stalls, 0U);
}

TEST_P(StreamerFailureTest, AFailingPrefetchIsTheMatterOfItsOwnUnit) {
  make({.unit_bytes = equal_units(6)});
  fail_once(1);
  acquire(0);
  compute_and_release(0);
  acquire(2);
  compute_and_release(2);
  EXPECT_EQ(message_of<FileError>([this] { acquire(1); }), "unit 1 cannot be read");
  acquire(1);
  compute_and_release(1);
  EXPECT_EQ(finished(), 3);
}

TEST_F(HostStreamerFailureTest, APrefetchThatTheDeviceRefusesDoesNotFailTheAcquire) {
  // Of an acquire's calls the first is that of its own load, the second the prefetch's.
  for (const std::string fault : {"mark:2", "record:2"}) {
    SCOPED_TRACE(fault);
    make({.unit_bytes = equal_units(6), .faults = fault});
    const int before = computed();
    acquire(0);
    EXPECT_EQ(streamer_->stats().loads, 1U);
    compute_and_release(0);
    acquire(1);  // not loaded ahead, and loaded now
    compute_and_release(1);
    EXPECT_EQ(computed() - before, 2);
  }
}

TEST_P(StreamerFailureTest, AFailedPrefetchThatNobodyNeedsIsForgotten) {
  make({.unit_bytes = equal_units(6)});
  fail_once(2);
  acquire(0);  // asks for 1 and 2
  compute_and_release(0);
  acquire(5, Travel::kBackward);  // 4 and 3; later 2 is loaded anew
  compute_and_release(5);
  acquire(4, Travel::kBackward);
  compute_and_release(4);
  store_->before_loads(nullptr);
  streamer_->invalidate(2);
  acquire(2, Travel::kBackward);
  compute_and_release(2);
  EXPECT_EQ(finished(), 4);
}

TEST_F(HostStreamerFailureTest, AResidentUnitWhoseLoadFailedIsLoadedAgain) {
  make({.unit_bytes = equal_units(2), .resident = resident_units(2, {0, 1}), .faults = "copy:1"});
  EXPECT_THROW(acquire(0), DeviceError);
  acquire(1);
  compute_and_release(1);
  acquire(0);
  compute_and_release(0);
  EXPECT_EQ(finished(), 2);
}

TEST_F(HostStreamerFailureTest, AReleaseThatFailsCanBeTriedAgain) {
  make({.unit_bytes = equal_units(3), .slots = 2, .prefetch = 0, .faults = "record:2"});
  acquire(0);
  EXPECT_THROW(streamer_->release(0, kCallerStream), DeviceError);
  EXPECT_THROW(acquire(2), InvalidArgument);  // 0 is still acquired
  compute_and_release(0);
  acquire(2);
  compute_and_release(2);
  EXPECT_EQ(finished(), 2);
}

// A HostDevice's stream runs the load, and learns of the failure, when its turn comes; a GPU cannot
// be told, so the acquire says it [Note: reads and waits].
TEST_P(StreamerFailureTest, OnAStreamOfItsOwnAFailedLoadIsReportedAndLoadedAgain) {
  make({.unit_bytes = equal_units(3), .slots = 2, .prefetch = 0});
  fail_once(0);
  const auto use_and_finish = [this] {
    streamer_->acquire(0, compute(), Travel::kForward);
    const Event event(*device_);
    device_->record(event.handle(), compute());
    streamer_->release(0, compute());
    device_->synchronize(event.handle());
  };
  EXPECT_EQ(message_of<FileError>(use_and_finish), "unit 0 cannot be read");
  streamer_->check_invariants();
  use(0);
  EXPECT_EQ(finished(), 1);
  EXPECT_EQ(streamer_->stats().loads, 2U);
}

TEST_P(StreamerFailureTest, AFailedLoadIsReportedOnEveryStreamAndLoadedAgainWhenAllHaveReleased) {
  make({.unit_bytes = equal_units(3), .slots = 2, .prefetch = 0});
  if (!on_gpu()) GTEST_SKIP() << "a host device's own streams learn of it later";
  fail_once(0);
  const Stream other(*device_);
  EXPECT_THROW(streamer_->acquire(0, compute(), Travel::kForward), FileError);
  use(0, Travel::kForward, other.handle());
  device_->synchronize(other.handle());
  EXPECT_EQ(finished(), 1);
}

// Two steps in which any one call of the operation fails. Whoever meets the failure tries again:
// every use must see its bytes, and in the end no page may be lost (checked by the fixture).
TEST_F(HostStreamerFailureTest, AnyRefusedCallLeavesTheStreamerUsable) {
  for (const std::string operation : {"wait", "record", "mark", "copy"}) {
    for (int call = 1; call <= 30; ++call) {
      SCOPED_TRACE(operation + ":" + std::to_string(call));
      make({.unit_bytes = equal_units(6, 5000),
            .slots = 3,
            .prefetch = 1,
            .poison = call % 2 == 0,
            .faults = operation + ":" + std::to_string(call)});
      const int before = computed();
      int failures = 0;
      const auto insist = [&failures](const std::function<void()>& action) {
        try {
          action();
        } catch (const DeviceError&) {
          ++failures;
          action();
        }
      };
      for (int step = 0; step < 2; ++step) {
        for (int i = 0; i < 12; ++i) {
          const auto unit = static_cast<std::size_t>(i < 6 ? i : 11 - i);
          insist([&] { acquire(unit, i < 6 ? Travel::kForward : Travel::kBackward); });
          run_unit(unit, kCallerStream);
          insist([&] { streamer_->release(unit, kCallerStream); });
          streamer_->check_invariants();
        }
      }
      EXPECT_EQ(computed() - before, 24);
      EXPECT_LE(failures, 1);
    }
  }
}

TEST_F(HostStreamerFailureTest, AStreamerThatCannotBeMadeLosesNothing) {
  for (const std::string operation :
       {"reserve", "create", "map", "create_stream", "create_event", "wait", "record", "mark"}) {
    for (int call = 1; call <= 5; ++call) {
      SCOPED_TRACE(operation + ":" + std::to_string(call));
      const StreamerSetup setup = {.unit_bytes = equal_units(5, 2 * kPageBytes),
                                   .slots = 2,
                                   .prefetch = 0,
                                   .resident = resident_units(5, {0, 4}),
                                   .faults = operation + ":" + std::to_string(call)};
      try {
        make(setup);
      } catch (const DeviceError&) {
        if (pool_ == nullptr) continue;  // the fixture's own stream was refused
        EXPECT_EQ(pool_->used_bytes(), 0U);
        check_device();
      }
    }
  }
}

}  // namespace
}  // namespace trae_mem::test
