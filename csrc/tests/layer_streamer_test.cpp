// Which units are loaded when, and how often.
#include "streamer_fixture.h"

namespace trae_mem::test {
namespace {

using Units = std::vector<std::size_t>;

class LayerStreamerTest : public StreamerDeviceTest {};
INSTANTIATE_TEST_SUITE_P(On, LayerStreamerTest, ::testing::Values(kHost, kGpu), device_name);
class HostLayerStreamerTest : public StreamerTest {};

// --- turning around [Note: turn-around] ----------------------------------------------------------

TEST_P(LayerStreamerTest, AMicroStepLoadsTwiceTheUnitsThatHaveNoSlot) {
  for (std::size_t units = 1; units <= 11; ++units) {
    for (std::size_t slots = 2; slots <= 7; ++slots) {
      for (std::size_t prefetch = 0; prefetch + 2 <= slots; ++prefetch) {
        SCOPED_TRACE(std::to_string(units) + " units, " + std::to_string(slots) +
                     " slots, prefetch " + std::to_string(prefetch));
        make({.unit_bytes = equal_units(units, 512), .slots = slots, .prefetch = prefetch});
        const std::size_t without_slot = units - std::min(units, slots);
        train_step(compute());
        EXPECT_EQ(streamer_->stats().loads, units + without_slot);
        for (int step = 0; step < 3; ++step) {
          const std::uint64_t before = streamer_->stats().loads;
          train_step(compute());
          EXPECT_EQ(streamer_->stats().loads - before, 2 * without_slot);
        }
        streamer_->check_invariants();
      }
    }
  }
}

TEST_P(LayerStreamerTest, ReleasingAUnitOnlyAfterTheNextIsAcquiredCostsNoLoad) {
  constexpr std::size_t kUnits = 9;
  make({.unit_bytes = equal_units(kUnits), .slots = 4, .prefetch = 2});
  Units order;
  for (std::size_t unit = 0; unit < kUnits; ++unit) order.push_back(unit);
  for (std::size_t unit = kUnits; unit-- > 0;) order.push_back(unit);
  for (int step = 0; step < 4; ++step) {
    const std::uint64_t before = streamer_->stats().loads;
    std::optional<std::size_t> held;
    for (std::size_t i = 0; i < order.size(); ++i) {
      streamer_->acquire(order[i], compute(), i < kUnits ? Travel::kForward : Travel::kBackward);
      if (held.has_value() && *held != order[i]) streamer_->release(*held, compute());
      run_unit(order[i], compute());
      held = order[i];
      streamer_->check_invariants();
    }
    streamer_->release(*held, compute());
    EXPECT_EQ(streamer_->stats().loads - before, step == 0 ? kUnits + 5 : 2 * 5);
  }
  finish_compute();
}

TEST_P(LayerStreamerTest, AGenerationPassLoadsOnlyUnitsThatShareASlot) {
  for (std::size_t units = 2; units <= 11; ++units) {
    SCOPED_TRACE(units);
    constexpr std::size_t kSlots = 4;
    make({.unit_bytes = equal_units(units), .slots = kSlots, .prefetch = 2});
    // Slots 0, 1, … of units mod K units serve one unit more than the others.
    const std::size_t alone = units <= kSlots ? units : std::max(kSlots * 2, units) - units;
    const auto pass = [&] {
      for (std::size_t unit = 0; unit < units; ++unit) use(unit, Travel::kForwardAround);
      finish_compute();
    };
    pass();
    // The pass's last units may have loaded the first ones ahead, and then those need no load.
    std::uint64_t before = streamer_->stats().loads;
    pass();
    pass();
    EXPECT_EQ(streamer_->stats().loads - before, 2 * (units - alone));
  }
}

// --- prefetching ---------------------------------------------------------------------------------

TEST_P(LayerStreamerTest, TheNextUnitsInTheDirectionOfTravelAreLoadedAhead) {
  make({.unit_bytes = equal_units(10), .slots = 5, .prefetch = 3});
  use(2, Travel::kForward);
  EXPECT_EQ(store_->requested(), (Units{2, 3, 4, 5}));
  store_->forget_requests();
  use(9, Travel::kBackward);  // 9 takes the slot of 4
  EXPECT_EQ(store_->requested(), (Units{9, 8, 7, 6}));
}

// [Note: looking ahead]
TEST_P(LayerStreamerTest, AnAcquireBeginsWhatIsMissingAsFarAsTheSlotsReach) {
  make({.unit_bytes = equal_units(10)});
  const std::vector<Units> forward = {{0, 1, 2}, {3, 4}, {5}, {6}, {7}, {8}, {9}, {}, {}, {}};
  for (std::size_t unit = 0; unit < 10; ++unit) {
    store_->forget_requests();
    use(unit, Travel::kForward);
    EXPECT_EQ(store_->requested(), forward[unit]) << "forward at " << unit;
  }
  for (std::size_t unit = 10; unit-- > 0;) {
    store_->forget_requests();
    use(unit, Travel::kBackward);
    // The units that are three behind; at the turn the last four are there.
    const Units expected = unit == 9 || unit < 3 ? Units{} : Units{unit - 3};
    EXPECT_EQ(store_->requested(), expected) << "backward at " << unit;
  }
}

TEST_P(LayerStreamerTest, PrefetchEndsAtTheLastUnitAndAtTheFirst) {
  make({.unit_bytes = equal_units(10)});
  use(8, Travel::kForward);
  EXPECT_EQ(store_->requested(), (Units{8, 9}));
  store_->forget_requests();
  use(1, Travel::kBackward);
  EXPECT_EQ(store_->requested(), (Units{1, 0}));
}

TEST_P(LayerStreamerTest, PrefetchAroundGoesOnAtTheFirstUnit) {
  make({.unit_bytes = equal_units(10)});
  use(9, Travel::kForwardAround);
  EXPECT_EQ(store_->requested(), (Units{9, 0}));  // 1 is in the slot of 9
  store_->forget_requests();
  use(8, Travel::kForwardAround);  // 9 and 0 are there; 8 took the slot of 0
  EXPECT_EQ(store_->requested(), (Units{8}));
}

TEST_P(LayerStreamerTest, WithoutPrefetchNothingIsLoadedAhead) {
  make({.unit_bytes = equal_units(6), .slots = 2, .prefetch = 0});
  for (std::size_t unit = 0; unit < 6; ++unit) {
    use(unit, Travel::kForwardAround);
    EXPECT_EQ(store_->requested().size(), unit + 1);
  }
}

TEST_P(LayerStreamerTest, MorePrefetchThanUnitsLoadsEachOnce) {
  make({.unit_bytes = equal_units(4), .slots = 4, .prefetch = 1000});
  use(1, Travel::kForwardAround);
  EXPECT_EQ(store_->requested(), (Units{1, 2, 3, 0}));
  use(2, Travel::kForwardAround);
  EXPECT_EQ(store_->requested().size(), 4U);
}

TEST_P(LayerStreamerTest, PrefetchNeverTakesTheSlotOfAnAcquiredUnit) {
  make({.unit_bytes = equal_units(8)});
  streamer_->acquire(0, compute(), Travel::kForward);
  streamer_->acquire(2, compute(), Travel::kForward);  // would like 3 and 4, and 4 needs slot 0
  EXPECT_EQ(store_->requested(), (Units{0, 1, 2, 3}));
  streamer_->check_invariants();
  streamer_->drain();
  run_unit(0, compute());
  run_unit(2, compute());
  finish_compute();
  EXPECT_EQ(computed(), 2);
  streamer_->release(0, compute());
  streamer_->release(2, compute());
}

TEST_P(LayerStreamerTest, PrefetchNeverTakesTheSlotOfTheUnitThatIsBeingAcquired) {
  make({.unit_bytes = equal_units(5)});
  use(4, Travel::kForwardAround);  // the next is 0, in the same slot
  EXPECT_EQ(store_->requested(), Units{4});
  finish_compute();
  EXPECT_EQ(computed(), 1);
}

TEST_P(LayerStreamerTest, PrefetchNeverTakesTheSlotOfAUnitThatIsNeededSooner) {
  make({.unit_bytes = equal_units(5)});
  use(3, Travel::kForwardAround);  // next 4, then 0 in the same slot
  EXPECT_EQ(store_->requested(), (Units{3, 4}));
  use(4, Travel::kForwardAround);
  EXPECT_EQ(store_->requested(), (Units{3, 4}));  // it was still there
}

// --- resident units ------------------------------------------------------------------------------

TEST_P(LayerStreamerTest, AResidentUnitIsLoadedOnceAndNeverEvicted) {
  make({.unit_bytes = equal_units(8),
        .slots = 3,
        .prefetch = 1,
        .resident = resident_units(8, {0, 3, 7})});
  EXPECT_EQ(store_->requested(), (Units{0, 3, 7}));
  for (int step = 0; step < 3; ++step) train_step(compute());
  finish_compute();
  for (const std::size_t resident : {0U, 3U, 7U}) {
    EXPECT_EQ(std::count(store_->requested().begin(), store_->requested().end(), resident), 1);
  }
  // Five streamed units with three slots; the three residents add one load each.
  EXPECT_EQ(streamer_->stats().loads, 3U + 5U + 2U + 2U * (2 * 2));
}

TEST_P(LayerStreamerTest, AResidentUnitPrefetchesTheStreamedUnitsBesideIt) {
  make({.unit_bytes = equal_units(8), .resident = resident_units(8, {3, 4})});
  store_->forget_requests();
  use(3, Travel::kForward);
  EXPECT_EQ(store_->requested(), (Units{5, 6}));
  store_->forget_requests();
  use(4, Travel::kBackward);
  EXPECT_EQ(store_->requested(), (Units{2, 1}));
}

TEST_P(LayerStreamerTest, WhenAllUnitsAreResidentNothingIsStreamed) {
  make({.unit_bytes = equal_units(3), .slots = 0, .prefetch = 0, .resident = {true, true, true}});
  for (int step = 0; step < 2; ++step) train_step(compute());
  finish_compute();
  EXPECT_EQ(streamer_->stats().loads, 3U);
  EXPECT_EQ(streamer_->bytes_on_device(), 3U * 4096);
}

TEST_P(LayerStreamerTest, AsManySlotsAsUnitsLoadEachUnitOnce) {
  make({.unit_bytes = equal_units(4)});
  for (int step = 0; step < 3; ++step) train_step(compute());
  finish_compute();
  EXPECT_EQ(streamer_->stats().loads, 4U);
}

TEST_P(LayerStreamerTest, ASingleUnitNeedsASingleSlot) {
  make({.unit_bytes = {300'000}});
  EXPECT_EQ(streamer_->bytes_on_device(), 300'032U);  // 256-byte aligned
  for (int step = 0; step < 3; ++step) train_step(compute());
  finish_compute();
  EXPECT_EQ(streamer_->stats().loads, 1U);
}

TEST_P(LayerStreamerTest, UnitsOfDifferentSizesShareSlotsOfTheLargest) {
  const Units sizes = {8, 3 * kPageBytes + 8, 256, 100'000, 4096, kPageBytes, 24};
  make({.unit_bytes = sizes, .slots = 3, .prefetch = 1, .resident = resident_units(7, {0})});
  EXPECT_EQ(streamer_->bytes_on_device(), 256 + 3 * (3 * kPageBytes + 256));
  for (int step = 0; step < 3; ++step) train_step(compute());
  finish_compute();
  EXPECT_EQ(computed(), 3 * 14);
}

// A window that lost its slot keeps no page-table entries: see core/host_device.h.
TEST_F(HostLayerStreamerTest, ResidentMemoryDoesNotGrowWithTheNumberOfUnits) {
  const std::size_t before = resident_shared_bytes();
  const auto after_a_step = [&](std::size_t units) {
    make({.unit_bytes = equal_units(units, kPageBytes)});
    train_step(kCallerStream);
    streamer_->drain();
    return resident_shared_bytes() - before;
  };
  const std::size_t few = after_a_step(6);
  EXPECT_GE(few, 4 * kPageBytes);
  EXPECT_LT(after_a_step(40), few + kPageBytes);
}

TEST_P(LayerStreamerTest, WindowsNeverMoveAndAreAlignedAsTensorsAre) {
  make({.unit_bytes = equal_units(7, 1000), .resident = resident_units(7, {1})});
  std::vector<Address> windows;
  for (std::size_t unit = 0; unit < 7; ++unit) windows.push_back(streamer_->window(unit));
  train_step(compute());
  finish_compute();
  for (std::size_t unit = 0; unit < 7; ++unit) {
    EXPECT_EQ(streamer_->window(unit), windows[unit]);
    EXPECT_EQ(windows[unit] % SlotArena::kAlignment, 0U);
    EXPECT_EQ(std::count(windows.begin(), windows.end(), windows[unit]), 1);
  }
  EXPECT_THROW(static_cast<void>(streamer_->window(7)), std::out_of_range);
}

// --- options -------------------------------------------------------------------------------------

TEST_P(LayerStreamerTest, OptionsThatDoNotFitEachOtherAreRefused) {
  EXPECT_THROW(make({.unit_bytes = equal_units(5), .resident = {true, false}}), InvalidArgument);
  const std::string message = message_of<InvalidArgument>(
      [this] { make({.unit_bytes = equal_units(5), .slots = 4, .prefetch = 3}); });
  EXPECT_NE(message.find("prefetch 3 needs 5 slots, not 4"), std::string::npos) << message;
  EXPECT_EQ(pool_->used_bytes(), 0U);
}

TEST_P(LayerStreamerTest, ManySlotsAreNeededForManyStreamedUnitsOnly) {
  make({.unit_bytes = equal_units(3), .slots = 3, .prefetch = 8});
  make({.unit_bytes = equal_units(3), .slots = 1, .prefetch = 8, .resident = {true, false, true}});
  train_step(compute());
  finish_compute();
}

TEST_P(LayerStreamerTest, AStoreWithoutUnitsIsNoError) {
  make({.unit_bytes = {}});
  EXPECT_EQ(streamer_->units(), 0U);
  EXPECT_EQ(streamer_->bytes_on_device(), 0U);
  streamer_->drain();
}

TEST_P(LayerStreamerTest, WithoutRoomForTheSlotsThereIsNoStreamer) {
  EXPECT_THROW(make({.unit_bytes = equal_units(6, kPageBytes), .limit_bytes = 3 * kPageBytes}),
               OutOfMemory);
  EXPECT_EQ(pool_->used_bytes(), 0U);
  make({.unit_bytes = equal_units(6, kPageBytes), .limit_bytes = 4 * kPageBytes});
  train_step(compute());
  finish_compute();
}

}  // namespace
}  // namespace trae_mem::test
