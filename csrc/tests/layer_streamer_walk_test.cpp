// Adversaries: random walks over random set-ups, in any order, with delays that reorder whatever
// is not ordered by an event; and callers in several threads.
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "streamer_fixture.h"

namespace trae_mem::test {
namespace {

struct Walk {
  std::uint64_t seed = 0;
  bool on_caller_stream = false;
  StreamerDevice device = kHost;
};

class StreamerWalkTest : public StreamerTest, public ::testing::WithParamInterface<Walk> {
 protected:
  std::size_t draw(std::size_t limit) { return random_() % limit; }
  bool chance(std::size_t one_in) { return draw(one_in) == 0; }
  void SetUp() override { choose(GetParam().device); }

  void make_random() {
    StreamerSetup setup;
    const std::size_t units = 1 + draw(12);
    std::size_t rank = 0;
    setup.prefetch = draw(4);
    setup.slots = setup.prefetch + 2 + draw(3);
    for (std::size_t unit = 0; unit < units; ++unit) {
      setup.unit_bytes.push_back(8 * (1 + draw(chance(6) ? 300'000 : 3000)));
      setup.resident.push_back(chance(5));
      if (!setup.resident.back()) slot_.emplace(unit, rank++);
    }
    for (auto& [unit, slot] : slot_) slot %= std::min(setup.slots, slot_.size());
    setup.poison = chance(3);
    setup.random_delay_us = chance(2) ? 0 : draw(200);
    setup.seed = random_();
    make(setup);
  }

  // The acquired unit that has the slot of `unit`, if another one has.
  std::optional<std::size_t> in_the_way(std::size_t unit) const {
    for (const std::size_t other : acquired_) {
      if (other != unit && slot_.contains(other) && slot_.contains(unit) &&
          slot_.at(other) == slot_.at(unit)) {
        return other;
      }
    }
    return std::nullopt;
  }

  void acquire(std::size_t unit, StreamHandle stream) {
    const auto travel = static_cast<Travel>(draw(3));
    if (in_the_way(unit).has_value()) {
      EXPECT_THROW(streamer_->acquire(unit, stream, travel), InvalidArgument);
      return;
    }
    streamer_->acquire(unit, stream, travel);
    acquired_.insert(unit);
    run_unit(unit, stream);
  }

  std::mt19937_64 random_{GetParam().seed};
  std::map<std::size_t, std::size_t> slot_;  // of each streamed unit, by the rule of the header
  std::set<std::size_t> acquired_;
  std::map<std::size_t, StreamHandle> user_;  // the stream that acquired the unit
};

TEST_P(StreamerWalkTest, EveryUseSeesItsBytesWhateverCameBefore) {
  make_random();
  const Stream second(*device_);
  const std::size_t units = store_->units();
  for (int step = 0; step < 300; ++step) {
    const StreamHandle stream = GetParam().on_caller_stream ? kCallerStream
                                : chance(4)                 ? second.handle()
                                                            : compute();
    const std::size_t unit = draw(units);
    if (acquired_.contains(unit)) {
      if (chance(2)) run_unit(unit, user_.at(unit));
      streamer_->release(unit, user_.at(unit));
      acquired_.erase(unit);
    } else if (chance(6)) {
      store_->change(unit);
      streamer_->invalidate(unit);
    } else {
      acquire(unit, stream);
      user_.insert_or_assign(unit, stream);
    }
    if (chance(40)) streamer_->drain();
    streamer_->check_invariants();
  }
  for (const std::size_t unit : acquired_) streamer_->release(unit, user_.at(unit));
  finish_compute();
  device_->synchronize(second.handle());
}

std::vector<Walk> walks() {
  std::vector<Walk> result;
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    result.push_back({seed, seed % 4 == 0, kHost});
    if (seed % 2 == 0) result.push_back({seed, seed % 4 == 0, kGpu});
    if (seed % 3 == 0) result.push_back({seed, seed % 4 == 0, kGpuFromSource});
  }
  return result;
}

std::string walk_name(const ::testing::TestParamInfo<Walk>& walk) {
  return walk.param.device.name + "_" + std::to_string(walk.param.seed);
}

INSTANTIATE_TEST_SUITE_P(Seeds, StreamerWalkTest, ::testing::ValuesIn(walks()), walk_name);

using Training = std::tuple<std::size_t, StreamerDevice>;

class StreamerTrainingTest : public StreamerTest, public ::testing::WithParamInterface<Training> {
 protected:
  void SetUp() override { choose(std::get<StreamerDevice>(GetParam())); }
};

// Training as it is: forth and back, with poison, delays, changed units and a late release.
TEST_P(StreamerTrainingTest, StepsWithDelaysSeeTheirBytes) {
  const std::size_t seed = std::get<std::size_t>(GetParam());
  std::mt19937_64 random(seed);
  constexpr std::size_t kUnits = 11;
  const std::size_t prefetch = seed % 4;
  make({.unit_bytes = equal_units(kUnits, 24'000),
        .slots = prefetch + 2 + seed % 2,
        .prefetch = prefetch,
        .poison = seed % 3 == 0,
        .random_delay_us = 150,
        .seed = seed});
  for (int step = 0; step < 4; ++step) {
    std::size_t held = kUnits;  // none
    for (int i = 0; i < 22; ++i) {
      const auto unit = static_cast<std::size_t>(i < 11 ? i : 21 - i);
      streamer_->acquire(unit, compute(), i < 11 ? Travel::kForward : Travel::kBackward);
      if (held < kUnits && held != unit) streamer_->release(held, compute());
      held = unit;
      run_unit(unit, compute());
      if (i < 11 && random() % 2 == 0) {  // as the post-forward hook, or as backward does
        streamer_->release(unit, compute());
        held = kUnits;
      }
      streamer_->check_invariants();
    }
    if (held < kUnits) streamer_->release(held, compute());
    const std::size_t changed = random() % kUnits;
    store_->change(changed);
    streamer_->invalidate(changed);
  }
  finish_compute();
  EXPECT_EQ(computed(), 4 * 22);
}

std::string training_name(const ::testing::TestParamInfo<Training>& training) {
  return std::get<StreamerDevice>(training.param).name + "_" +
         std::to_string(std::get<std::size_t>(training.param));
}

INSTANTIATE_TEST_SUITE_P(Seeds, StreamerTrainingTest,
                         ::testing::Combine(::testing::Range<std::size_t>(0, 12),
                                            ::testing::Values(kHost, kGpu, kGpuFromSource)),
                         training_name);

class StreamerThreadsTest : public StreamerDeviceTest {};
INSTANTIATE_TEST_SUITE_P(On, StreamerThreadsTest, ::testing::Values(kHost, kGpu, kGpuFromSource),
                         device_name);

TEST_P(StreamerThreadsTest, CallersInSeveralThreadsSeeTheirBytes) {
  constexpr std::size_t kUnits = 16;
  constexpr std::size_t kSlots = 4;
  make({.unit_bytes = equal_units(kUnits, 8000), .slots = kSlots, .prefetch = 2, .seed = 5});
  std::atomic<bool> done = false;
  std::vector<std::thread> callers;
  // Each has a slot of its own, so that no two need one at once; prefetches cross all the same.
  for (std::size_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([this, caller] {
      std::mt19937_64 random(caller);
      for (int i = 0; i < 200; ++i) {
        const std::size_t unit = caller + kSlots * (random() % (kUnits / kSlots));
        use(unit, static_cast<Travel>(random() % 3), kCallerStream);
      }
    });
  }
  std::thread watcher([this, &done] {
    std::uint64_t next = 0;
    while (!done) {
      streamer_->check_invariants();
      const StreamerStats stats = streamer_->stats();
      EXPECT_LE(stats.hits + stats.stalls, stats.acquires);
      next = streamer_->events(next).next;
      std::this_thread::yield();
    }
  });
  for (std::thread& caller : callers) caller.join();
  done = true;
  watcher.join();
  EXPECT_EQ(finished(), 600);
  streamer_->drain();
  EXPECT_EQ(streamer_->stats().hits + streamer_->stats().stalls, 600U);
}

}  // namespace
}  // namespace trae_mem::test
