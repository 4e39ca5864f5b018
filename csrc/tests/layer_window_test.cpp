// [Note: packed slots] in core/layer_window.h: exact places, aliases that agree, neighbours that
// share a page and no byte.
#include "core/layer_window.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "core/host_device.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

class LayerWindowTest : public ::testing::Test {
 protected:
  void make_pool(const std::string& faults = "") {
    device_ = std::make_shared<HostDevice>(
        HostDeviceOptions{.memory_bytes = 32 * kPageBytes, .faults = faults});
    pool_ = std::make_shared<PagePool>(device_);
  }
  void SetUp() override { make_pool(); }
  void TearDown() override {
    device_->check_invariants();
    pool_->check_invariants();
    EXPECT_EQ(pool_->used_bytes(), 0U);
    pool_.reset();
    EXPECT_EQ(device_->info().used_bytes, 0U);
  }

  void write(const LayerWindow& window, const std::vector<std::byte>& bytes) {
    device_->copy_to_device(window.address(), bytes.data(), bytes.size(), kCallerStream);
  }
  static std::vector<std::byte> read(const LayerWindow& window) {
    const auto* begin = reinterpret_cast<const std::byte*>(window.address());
    return {begin, begin + window.bytes()};
  }

  std::shared_ptr<HostDevice> device_;
  std::shared_ptr<PagePool> pool_;
};

TEST_F(LayerWindowTest, SlotsArePackedIntoAsFewPagesAsTheirBytesNeed) {
  constexpr std::size_t kSlot = kPageBytes / 2 + kPageBytes / 8;  // 5 of them: 3.125 pages
  const SlotArena arena(*pool_, kSlot, 5);
  EXPECT_EQ(pool_->used_bytes(), 4 * kPageBytes);
  EXPECT_EQ(arena.slot_bytes(), kSlot);
}

TEST_F(LayerWindowTest, SlotsAreRoundedUpToTheAlignmentOfTensors) {
  const SlotArena arena(*pool_, 1000, 3);
  EXPECT_EQ(arena.slot_bytes(), 1024U);
  for (std::size_t slot = 0; slot < 3; ++slot) {
    EXPECT_EQ(arena.window(slot, 1000)->address() % SlotArena::kAlignment, 0U);
  }
}

TEST_F(LayerWindowTest, EveryWindowOfASlotShowsTheSameBytes) {
  constexpr std::size_t kSlot = 3 * kPageBytes + 4352;  // begins and ends inside pages
  const SlotArena arena(*pool_, kSlot, 3);
  for (std::size_t slot = 0; slot < 3; ++slot) {
    const auto first = arena.window(slot, kSlot);
    const auto second = arena.window(slot, kSlot);
    const auto part = arena.window(slot, kPageBytes + 1);
    EXPECT_NE(first->address(), second->address());
    const auto bytes = test_bytes(kSlot, slot);
    write(*first, bytes);
    EXPECT_EQ(read(*second), bytes);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.begin() + kPageBytes + 1, read(*part).begin()));
  }
}

TEST_F(LayerWindowTest, NeighbouringSlotsShareAPageAndNoByte) {
  for (const std::size_t slot_bytes : {std::size_t{256}, std::size_t{4096 + 256},
                                       kPageBytes / 3 / 256 * 256, kPageBytes, kPageBytes + 256}) {
    constexpr std::size_t kSlots = 7;
    const SlotArena arena(*pool_, slot_bytes, kSlots);
    std::vector<std::unique_ptr<LayerWindow>> windows;
    std::vector<std::vector<std::byte>> bytes;
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      windows.push_back(arena.window(slot, slot_bytes));
      bytes.push_back(test_bytes(slot_bytes, slot));
    }
    // Twice and in both directions: a write that strays hurts one that was there before.
    for (std::size_t slot = 0; slot < kSlots; ++slot) write(*windows[slot], bytes[slot]);
    for (std::size_t slot = kSlots; slot-- > 0;) write(*windows[slot], bytes[slot]);
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      EXPECT_EQ(read(*windows[slot]), bytes[slot]) << "slot " << slot << " of " << slot_bytes;
    }
  }
}

TEST_F(LayerWindowTest, AWindowHasExactlyItsUnitsBytes) {
  const SlotArena arena(*pool_, 5000, 2);
  EXPECT_EQ(arena.window(1, 1234)->bytes(), 1234U);
}

TEST_F(LayerWindowTest, RestingOneWindowKeepsItsNeighboursBytes) {
  const SlotArena arena(*pool_, 6400, 3);
  std::vector<std::unique_ptr<LayerWindow>> windows;
  for (std::size_t slot = 0; slot < 3; ++slot) {
    windows.push_back(arena.window(slot, 6400));
    write(*windows[slot], test_bytes(6400, slot));
  }
  device_->rest(windows[1]->address(), windows[1]->bytes(), kCallerStream);
  device_->prepare(windows[1]->address(), windows[1]->bytes(), kCallerStream);
  for (std::size_t slot = 0; slot < 3; ++slot) {
    EXPECT_EQ(read(*windows[slot]), test_bytes(6400, slot));
  }
}

TEST_F(LayerWindowTest, RefusesASlotThatIsNotThereAndAUnitThatDoesNotFit) {
  const SlotArena arena(*pool_, 1024, 2);
  EXPECT_THROW(static_cast<void>(arena.window(2, 1024)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(arena.window(0, 1025)), InvalidArgument);
}

TEST_F(LayerWindowTest, WithoutRoomThereIsNoArenaAndNothingIsLost) {
  EXPECT_THROW(SlotArena(*pool_, 11 * kPageBytes, 3), OutOfMemory);
  EXPECT_EQ(pool_->used_bytes(), 0U);
}

TEST_F(LayerWindowTest, AWindowThatCannotBeMappedGivesBackWhatItHad) {
  make_pool("map:2");
  const SlotArena arena(*pool_, 3 * kPageBytes, 1);
  EXPECT_THROW(static_cast<void>(arena.window(0, 3 * kPageBytes)), DeviceError);
  device_->check_invariants();
  const auto window = arena.window(0, 3 * kPageBytes);
  write(*window, test_bytes(3 * kPageBytes, 1));
  EXPECT_EQ(read(*window), test_bytes(3 * kPageBytes, 1));
}

}  // namespace
}  // namespace trae_mem::test
