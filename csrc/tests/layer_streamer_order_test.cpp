// What may overtake what: each test holds one stream with a gate and sees that the other waits.
// Every test here fails when the wait, the record or the rule that it is about is taken out.
#include "streamer_fixture.h"

namespace trae_mem::test {
namespace {

class StreamerOrderTest : public StreamerDeviceTest {
 protected:
  // Units 0 and 2 share a slot, unit 1 has the other; nothing is prefetched.
  void make_three_units(bool poison = false) {
    make({.unit_bytes = equal_units(3, 100'000), .slots = 2, .prefetch = 0, .poison = poison});
  }
  // A whole use of the unit is queued, and does not begin before the gate opens.
  void use_behind(Gate& gate, std::size_t unit) {
    streamer_->acquire(unit, compute(), Travel::kForward);
    device_->run(gate.task(), compute());
    run_unit(unit, compute());
    streamer_->release(unit, compute());
  }
  bool load_reached(std::size_t unit) {
    return happens([this, unit] { return store_->reached(unit); });
  }
};

INSTANTIATE_TEST_SUITE_P(On, StreamerOrderTest, ::testing::Values(kHost, kGpu), device_name);
class HostStreamerOrderTest : public StreamerTest {};

TEST_P(StreamerOrderTest, ComputeWaitsForTheLoadOfItsUnit) {
  make_three_units();
  Gate gate;
  store_->before_loads([task = gate.task()](std::size_t) { task(); });
  use(0);
  EXPECT_FALSE(happens([this] { return computed() > 0; }));
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 1);
}

TEST_P(StreamerOrderTest, ComputeWaitsForALoadThatWasPrefetched) {
  make({.unit_bytes = equal_units(6, 100'000)});
  Gate gate;
  store_->before_loads([task = gate.task()](std::size_t unit) {
    if (unit == 1) task();
  });
  use(0);
  finish_compute();
  use(1);  // in flight already
  EXPECT_FALSE(happens([this] { return computed() > 1; }));
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 2);
}

TEST_P(StreamerOrderTest, ALoadWaitsForTheComputeThatUsesItsSlot) {
  make_three_units();
  Gate gate;
  use_behind(gate, 0);
  use(2);
  EXPECT_FALSE(load_reached(2));
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 2);
}

TEST_P(StreamerOrderTest, ALoadWaitsForTheLastUseNotForTheFirst) {
  make_three_units();
  use(0);
  finish_compute();
  Gate gate;
  use_behind(gate, 0);
  use(2);
  EXPECT_FALSE(load_reached(2));
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 3);
}

TEST_P(StreamerOrderTest, ALoadWaitsForTheComputeOfEveryStreamThatUsedTheSlot) {
  make_three_units();
  const Stream other(*device_);
  Gate gate;
  use_behind(gate, 0);
  use(0, Travel::kForward, other.handle());
  streamer_->acquire(2, other.handle(), Travel::kForward);
  EXPECT_FALSE(load_reached(2));
  gate.open();
  run_unit(2, other.handle());
  streamer_->release(2, other.handle());
  device_->synchronize(other.handle());
  finish_compute();
  EXPECT_EQ(computed(), 3);
}

// [Note: several streams]
TEST_P(StreamerOrderTest, AUnitAcquiredOnTwoStreamsIsOverwrittenBehindTheLastUseOfEach) {
  for (const bool first_is_held : {true, false}) {
    make_three_units();
    const Stream other(*device_);
    Gate gate;
    streamer_->acquire(0, compute(), Travel::kForward);
    streamer_->acquire(0, other.handle(), Travel::kForward);
    device_->run(gate.task(), first_is_held ? compute() : other.handle());
    run_unit(0, compute());
    run_unit(0, other.handle());
    streamer_->release(0, compute());
    EXPECT_THROW(streamer_->acquire(2, compute(), Travel::kForward), InvalidArgument);
    streamer_->release(0, other.handle());
    const Stream third(*device_);
    use(2, Travel::kForward, third.handle());
    EXPECT_FALSE(load_reached(2));
    gate.open();
    device_->synchronize(third.handle());
    device_->synchronize(other.handle());
    finish_compute();
    streamer_->check_invariants();
  }
  EXPECT_EQ(computed(), 6);
}

TEST_P(StreamerOrderTest, EveryStreamThatAcquiresAUnitWaitsForItsLoad) {
  make_three_units();
  const Stream other(*device_);
  Gate gate;
  store_->before_loads([task = gate.task()](std::size_t) { task(); });
  streamer_->acquire(0, compute(), Travel::kForward);
  use(0, Travel::kForward, other.handle());
  EXPECT_FALSE(happens([this] { return computed() > 0; }));
  gate.open();
  device_->synchronize(other.handle());
  EXPECT_EQ(computed(), 1);
  streamer_->release(0, compute());
}

// Two streams that use a slot in turn are not tied to each other by it.
TEST_P(StreamerOrderTest, AReleaseDoesNotMakeItsStreamWaitForAnother) {
  make_three_units();
  const Stream other(*device_);
  Gate gate;
  use_behind(gate, 0);
  use(0, Travel::kForward, other.handle());
  if (!on_gpu() || GpuUnderTest::instance().simulated()) device_->synchronize(other.handle());
  gate.open();
  EXPECT_EQ(finished() >= 1, true);
  device_->synchronize(other.handle());
  EXPECT_EQ(computed(), 2);
}

TEST_P(StreamerOrderTest, APrefetchedLoadWaitsForComputeToo) {
  make({.unit_bytes = equal_units(6, 100'000)});
  Gate gate;
  use_behind(gate, 0);
  use(2);  // asks for 4, which takes the slot of 0
  EXPECT_EQ(store_->requested(), (std::vector<std::size_t>{0, 1, 2, 3, 4}));
  EXPECT_FALSE(load_reached(4));
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 2);
}

TEST_P(StreamerOrderTest, TheHostQueuesAWholeStepWhileNothingComputes) {
  make({.unit_bytes = equal_units(10, 30'000)});
  Gate gate;
  device_->run(gate.task(), compute());
  train_step(compute());
  train_step(compute());
  EXPECT_EQ(computed(), 0);
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 40);
}

TEST_P(StreamerOrderTest, PoisonWaitsForCompute) {
  make_three_units(/*poison=*/true);
  Gate gate;
  use_behind(gate, 0);
  ASSERT_TRUE(eventually([&gate] { return gate.reached(); }));  // the unit is loaded
  EXPECT_FALSE(happens([this] { return window_bytes(0).front() == std::byte{0xFF}; }));
  gate.open();
  finish_compute();
}

TEST_P(StreamerOrderTest, AChangedUnitIsLoadedAnewThoughALoadIsInFlight) {
  make({.unit_bytes = equal_units(6, 100'000)});
  Gate gate;
  store_->before_loads([task = gate.task()](std::size_t unit) {
    if (unit == 1) task();
  });
  use(0);  // prefetches 1
  store_->change(1);
  streamer_->invalidate(1);
  use(1);
  gate.open();
  finish_compute();
  EXPECT_EQ(computed(), 2);
}

TEST_P(StreamerOrderTest, AStreamerIsDestroyedBehindTheComputeThatReadsItsWindows) {
  make_three_units();
  Gate gate;
  use_behind(gate, 0);
  std::atomic<bool> destroyed = false;
  std::thread destroying([this, &destroyed] {
    streamer_.reset();
    destroyed = true;
  });
  EXPECT_FALSE(happens([&destroyed] { return destroyed.load(); }));
  gate.open();
  destroying.join();
  EXPECT_EQ(computed(), 1);
}

TEST_P(StreamerOrderTest, DrainWaitsForLoads) {
  make({.unit_bytes = equal_units(6, 100'000)});
  Gate gate;
  store_->before_loads([task = gate.task()](std::size_t unit) {
    if (unit == 2) task();
  });
  streamer_->acquire(0, compute(), Travel::kForward);
  std::atomic<bool> drained = false;
  std::thread draining([this, &drained] {
    streamer_->drain();
    drained = true;
  });
  EXPECT_FALSE(happens([&drained] { return drained.load(); }));
  gate.open();
  draining.join();
  streamer_->release(0, compute());
}

// A constructor that fails midway has loads in flight, which write to pages that others may take
// from the pool as soon as they are back in it.
TEST_F(HostStreamerOrderTest, AStreamerThatCannotBeMadeGivesItsPagesBackBehindItsLoads) {
  make_device({.faults = "mark:2"});  // in front of the second load
  pool_ = std::make_shared<PagePool>(device_);
  store_ = std::make_shared<ScriptedStore>(equal_units(2));
  std::atomic<bool> given_back = false;
  store_->before_loads([this, &given_back](std::size_t) {
    given_back = happens([this] { return pool_->used_bytes() == 0; });
  });
  const LayerStreamerOptions options{.slots = 0, .prefetch = 0, .resident = {true, true}};
  EXPECT_THROW(std::make_shared<LayerStreamer>(pool_, store_, options), DeviceError);
  EXPECT_TRUE(store_->reached(0));
  EXPECT_FALSE(given_back);
}

}  // namespace
}  // namespace trae_mem::test
