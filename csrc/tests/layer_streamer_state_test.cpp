// Acquired, released, changed, poisoned: the states of a unit, the log of them and the counts.
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "streamer_fixture.h"

namespace trae_mem::test {
namespace {

class StreamerStateTest : public StreamerDeviceTest {
 protected:
  // Units 0 and 2 share a slot, unit 1 has the other; nothing is prefetched.
  void make_three_units(bool poison = false) {
    make({.unit_bytes = equal_units(3), .slots = 2, .prefetch = 0, .poison = poison});
  }
  // The log as "load 0, acquire 0, …".
  [[nodiscard]] std::string story() const {
    constexpr std::array<const char*, 5> kNames = {"load", "acquire", "release", "stall", "evict"};
    std::string result;
    for (const LogEntry& entry : log()) {
      if (!result.empty()) result += ", ";
      result += kNames.at(static_cast<std::size_t>(entry.kind));
      result += " " + std::to_string(entry.unit);
    }
    return result;
  }
};

INSTANTIATE_TEST_SUITE_P(On, StreamerStateTest, ::testing::Values(kHost, kGpu), device_name);

// --- acquire and release -------------------------------------------------------------------------

TEST_P(StreamerStateTest, AUnitWhoseSlotAnotherAcquiredUnitHasIsRefused) {
  make_three_units();
  streamer_->acquire(0, compute(), Travel::kForward);
  const std::string message =
      message_of<InvalidArgument>([this] { streamer_->acquire(2, compute(), Travel::kForward); });
  EXPECT_NE(message.find("unit 2 needs the slot of unit 0"), std::string::npos) << message;
  streamer_->check_invariants();
  run_unit(0, compute());  // untouched
  streamer_->release(0, compute());
  use(2);
  finish_compute();
  EXPECT_EQ(computed(), 2);
}

TEST_P(StreamerStateTest, ReleasingAUnitThatIsNotAcquiredDoesNothing) {
  make_three_units();
  streamer_->release(1, compute());
  EXPECT_EQ(story(), "");
  use(0);
  streamer_->drain();
  const std::string before = story();
  streamer_->release(0, compute());
  EXPECT_EQ(story(), before);
  streamer_->check_invariants();
}

TEST_P(StreamerStateTest, AStreamReleasesWhatItAcquiredAndNoMore) {
  make_three_units();
  const Stream other(*device_);
  streamer_->acquire(0, compute(), Travel::kForward);
  streamer_->release(0, other.handle());  // has not acquired it
  EXPECT_THROW(streamer_->invalidate(0), InvalidArgument);
  streamer_->acquire(0, compute(), Travel::kForward);  // twice
  streamer_->release(0, compute());                    // once
  streamer_->invalidate(0);
  streamer_->check_invariants();
}

TEST_P(StreamerStateTest, AReleasedUnitIsStillThere) {
  make_three_units();
  for (int i = 0; i < 5; ++i) use(0);
  finish_compute();
  EXPECT_EQ(streamer_->stats().loads, 1U);
}

TEST_P(StreamerStateTest, UnitsThatDoNotExistAreRefused) {
  make_three_units();
  EXPECT_THROW(streamer_->acquire(3, compute(), Travel::kForward), std::out_of_range);
  EXPECT_THROW(streamer_->release(3, compute()), std::out_of_range);
  EXPECT_THROW(streamer_->invalidate(3), std::out_of_range);
}

TEST_P(StreamerStateTest, AUnitOfNoBytesIsRefused) {
  for (const std::size_t empty : {0U, 1U, 2U}) {
    for (const bool resident : {false, true}) {
      std::vector<std::size_t> bytes = equal_units(3);
      bytes[empty] = 0;
      const StreamerSetup setup = {
          .unit_bytes = bytes,
          .resident = resident ? resident_units(3, {empty}) : std::vector<bool>{}};
      const std::string message = message_of<InvalidArgument>([&] { make(setup); });
      EXPECT_NE(message.find("unit " + std::to_string(empty) + " has 0 bytes"), std::string::npos)
          << message;
    }
  }
  EXPECT_THROW(make({.unit_bytes = {0}}), InvalidArgument);
}

// --- changed units -------------------------------------------------------------------------------

TEST_P(StreamerStateTest, AChangedUnitIsLoadedBeforeItsNextUse) {
  make({.unit_bytes = equal_units(3), .resident = resident_units(3, {2})});
  for (const std::size_t unit : {0U, 2U}) {  // a streamed and a resident one
    for (int i = 0; i < 3; ++i) {
      use(unit);
      finish_compute();
      store_->change(unit);
      streamer_->invalidate(unit);
      streamer_->check_invariants();
    }
    use(unit);
  }
  finish_compute();
  EXPECT_EQ(computed(), 8);
}

TEST_P(StreamerStateTest, InvalidatingAUnitThatIsNotLoadedDoesNothing) {
  make_three_units();
  use(0);
  finish_compute();
  streamer_->invalidate(2);  // in the slot of 0
  streamer_->invalidate(1);
  use(0);
  EXPECT_EQ(streamer_->stats().loads, 1U);
}

TEST_P(StreamerStateTest, AnAcquiredUnitCannotBeInvalidated) {
  make_three_units();
  streamer_->acquire(0, compute(), Travel::kForward);
  EXPECT_THROW(streamer_->invalidate(0), InvalidArgument);
  streamer_->release(0, compute());
  streamer_->invalidate(0);
}

// --- poison --------------------------------------------------------------------------------------

TEST_P(StreamerStateTest, AReleasedWindowReadsAsNaNUntilItIsLoadedAgain) {
  make_three_units(/*poison=*/true);
  use(0);
  streamer_->drain();
  const auto words = window_bytes(0);
  EXPECT_EQ(words, std::vector<std::byte>(words.size(), std::byte{0xFF}));
  use(0);
  finish_compute();
  EXPECT_EQ(computed(), 2);
  EXPECT_EQ(streamer_->stats().loads, 2U);
}

// [Note: several streams]
TEST_P(StreamerStateTest, AUnitIsReleasedAndPoisonedWhenTheLastStreamReleasesIt) {
  make_three_units(/*poison=*/true);
  const Stream other(*device_);
  streamer_->acquire(0, compute(), Travel::kForward);
  streamer_->acquire(0, other.handle(), Travel::kForward);
  run_unit(0, compute());
  streamer_->release(0, compute());
  streamer_->check_invariants();
  streamer_->drain();  // would poison it
  run_unit(0, other.handle());
  streamer_->release(0, other.handle());
  streamer_->drain();
  EXPECT_EQ(window_bytes(0).front(), std::byte{0xFF});
  EXPECT_EQ(finished(), 2);
  const auto logged = [this](EventKind kind) {
    const std::vector<LogEntry> entries = log();
    return std::count_if(entries.begin(), entries.end(),
                         [kind](const LogEntry& entry) { return entry.kind == kind; });
  };
  EXPECT_EQ(logged(EventKind::kAcquire), 1);
  EXPECT_EQ(logged(EventKind::kRelease), 1);
}

TEST_P(StreamerStateTest, WithPoisonEveryUseSeesItsBytes) {
  make({.unit_bytes = equal_units(7), .resident = resident_units(7, {3}), .poison = true});
  for (int step = 0; step < 3; ++step) train_step(compute());
  finish_compute();
  EXPECT_EQ(computed(), 3 * 14);
}

// --- the log and the counts ----------------------------------------------------------------------

TEST_P(StreamerStateTest, TheLogTellsWhatHappened) {
  make_three_units();
  if (on_gpu()) GTEST_SKIP() << "the host runs ahead of a GPU: the order is not determined";
  for (const std::size_t unit : {0U, 2U, 0U}) {
    use(unit, Travel::kForward, kCallerStream);
    streamer_->drain();
  }
  streamer_->acquire(0, kCallerStream, Travel::kForward);  // a hit
  streamer_->release(0, kCallerStream);
  std::string text = story();
  // Whether the first uses stalled depends on how fast their loads were.
  for (const std::string stall : {"stall 0, ", "stall 2, "}) {
    for (std::size_t at = text.find(stall); at != std::string::npos; at = text.find(stall)) {
      text.erase(at, stall.size());
    }
  }
  EXPECT_EQ(text,
            "load 0, acquire 0, release 0, evict 0, load 2, acquire 2, release 2, evict 2, "
            "load 0, acquire 0, release 0, acquire 0, release 0");
  for (const LogEntry& entry : log()) {
    EXPECT_EQ(entry.slot, 0U);
    EXPECT_EQ(entry.bytes, entry.kind == EventKind::kLoad ? 4096U : 0U);
    const bool lasts = entry.kind == EventKind::kLoad || entry.kind == EventKind::kStall;
    EXPECT_TRUE(lasts ? entry.begin_ns <= entry.end_ns : entry.begin_ns == entry.end_ns);
  }
}

TEST_P(StreamerStateTest, PoisonAndInvalidationAreEvictions) {
  for (const bool poison : {true, false}) {
    make_three_units(poison);
    use(0, Travel::kForward, kCallerStream);
    if (!poison) {
      streamer_->invalidate(0);
      streamer_->invalidate(0);  // once is enough
    }
    streamer_->drain();
    const std::string text = story();
    EXPECT_EQ(text.find("evict 0"), text.rfind("evict 0")) << text;
    EXPECT_LT(text.find("load 0"), text.find("evict 0")) << text;
    EXPECT_NE(text.find("evict 0"), std::string::npos) << text;
  }
}

// A reader of the log counts a unit as on the device from its load to its eviction.
TEST_P(StreamerStateTest, InTheLogASlotNeverHasTwoUnits) {
  make({.unit_bytes = equal_units(9), .random_delay_us = 100, .seed = 3});
  Gate gate;
  store_->before_loads([task = gate.task()](std::size_t unit) {
    if (unit == 7) task();
  });
  use(5);                     // asks for 6 and 7
  use(4, Travel::kBackward);  // asks for 3, which takes the slot of 7 while 7 is being loaded
  gate.open();
  train_step(compute());
  finish_compute();
  streamer_->drain();
  std::map<std::uint32_t, std::uint32_t> owner;  // slot -> unit
  for (const LogEntry& entry : log()) {
    if (entry.kind == EventKind::kLoad) {
      EXPECT_TRUE(owner.try_emplace(entry.slot, entry.unit).second)
          << "unit " << entry.unit << " was loaded into the slot of " << owner[entry.slot];
    } else if (entry.kind == EventKind::kEvict) {
      EXPECT_EQ(owner[entry.slot], entry.unit);
      owner.erase(entry.slot);
    }
  }
  EXPECT_EQ(owner.size(), 4U);
}

TEST_P(StreamerStateTest, AcquiresAreHitsAndStalls) {
  // A stall, if the compute stream gets to the unit while its load is held: try until it does.
  const auto stalls_once = [this] {
    make({.unit_bytes = equal_units(10)});
    Gate gate;
    store_->before_loads([task = gate.task()](std::size_t) { task(); });
    use(0);
    EXPECT_EQ(streamer_->stats().stalls + streamer_->stats().hits, 0U);  // not known yet
    EXPECT_FALSE(happens([this] { return computed() > 0; }));
    gate.open();
    finish_compute();
    streamer_->drain();
    EXPECT_EQ(streamer_->stats().stalls + streamer_->stats().hits, 1U);
    return streamer_->stats().stalls == 1;
  };
  ASSERT_TRUE(eventually(stalls_once));
  use(1, Travel::kForward, kCallerStream);
  StreamerStats stats = streamer_->stats();
  EXPECT_EQ(stats.stalls, 1U);
  EXPECT_EQ(stats.hits, 1U);  // its load was done
  for (int step = 0; step < 2; ++step) train_step(kCallerStream);
  streamer_->drain();
  finish_compute();
  stats = streamer_->stats();
  EXPECT_EQ(stats.acquires, 42U);
  EXPECT_EQ(stats.hits + stats.stalls, stats.acquires);
  EXPECT_EQ(stats.load_bytes, stats.loads * 4096);
  EXPECT_EQ(stats.loads, store_->requested().size());
  EXPECT_GT(stats.load_ns, 0);
  EXPECT_GT(stats.stall_ns, 0);
}

// [Note: stalls]: the host asks long before the stream gets there.
TEST_P(StreamerStateTest, ALoadThatIsDoneWhenComputeGetsThereIsNoStall) {
  if (on_gpu() && !GpuUnderTest::instance().simulated()) {
    GTEST_SKIP() << "this driver may run the host work of all streams one behind the other";
  }
  make_three_units();
  Gate loading;
  Gate computing;
  store_->before_loads([task = loading.task()](std::size_t) { task(); });
  device_->run(computing.task(), compute());
  use(0);  // the host is told that it is not loaded, and does not wait
  loading.open();
  const Stream other(*device_);
  use(0, Travel::kForward, other.handle());
  device_->synchronize(other.handle());  // now it is
  computing.open();
  finish_compute();
  streamer_->drain();
  ASSERT_TRUE(eventually([this] {
    const StreamerStats stats = streamer_->stats();
    return stats.hits + stats.stalls == 2;
  }));
  EXPECT_GE(streamer_->stats().hits, 1U);  // that of the compute stream
}

TEST_P(StreamerStateTest, TheTimesOfLoadsAndStallsAreThoseOfTheLog) {
  make({.unit_bytes = equal_units(10)});
  for (int step = 0; step < 2; ++step) train_step(kCallerStream);
  streamer_->drain();
  finish_compute();
  std::int64_t load_ns = 0;
  std::int64_t stall_ns = 0;
  for (const LogEntry& entry : log()) {
    if (entry.kind == EventKind::kLoad) load_ns += entry.end_ns - entry.begin_ns;
    if (entry.kind == EventKind::kStall) stall_ns += entry.end_ns - entry.begin_ns;
  }
  EXPECT_EQ(streamer_->stats().load_ns, load_ns);
  EXPECT_EQ(streamer_->stats().stall_ns, stall_ns);
}

// --- a forked child ------------------------------------------------------------------------------

TEST_P(StreamerStateTest, AChildProcessGoesOnOnceItHasAbandonedTheStreamer) {
  make_three_units();
  use(0);
  finish_compute();
  streamer_->drain();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // joining threads that a child does not have would never end
    streamer_->abandon();
    streamer_.reset();
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  use(2);
  finish_compute();
  EXPECT_EQ(computed(), 2);
}

}  // namespace
}  // namespace trae_mem::test
