// HostDevice: the conformance suite, and what is particular to RAM as a device.
#include "core/host_device.h"

#include <algorithm>

#include "device_conformance.h"

namespace trae_mem::test {
namespace {

void check_host_device(const Device& device) {
  dynamic_cast<const HostDevice&>(device).check_invariants();
}

DeviceCase host_case(const std::string& name, const HostDeviceOptions& options) {
  const auto make = [options](const DeviceWishes& wishes) {
    HostDeviceOptions wished = options;
    wished.memory_bytes = wishes.memory_bytes;
    wished.faults = wishes.faults;
    return std::make_shared<HostDevice>(wished);
  };
  return {name,
          make,
          check_host_device,
          {"reserve", "create", "map", "create_stream", "create_event", "record", "mark", "wait",
           "copy", "allocate_host"}};
}

// Delays and a link change when things happen, never what happens.
INSTANTIATE_TEST_SUITE_P(
    Host, DeviceConformance,
    ::testing::Values(host_case("plain", {}),
                      host_case("random_delays", {.random_delay_us = 300, .seed = 7}),
                      host_case("link", {.link_bytes_per_second = 50'000'000'000U})),
    case_name);

class HostDeviceTest : public ::testing::Test {
 protected:
  void TearDown() override { device_->check_invariants(); }
  std::shared_ptr<HostDevice> device_ =
      std::make_shared<HostDevice>(HostDeviceOptions{.memory_bytes = 16 * kPageBytes});
};

TEST_F(HostDeviceTest, ItsMemoryIsWhatWasAskedForInWholePagesOrTheMachines) {
  EXPECT_EQ(device_->info().name, "host");
  EXPECT_EQ(HostDevice({.memory_bytes = 3 * kPageBytes + 5}).info().total_bytes, 3 * kPageBytes);
  EXPECT_GT(HostDevice({}).info().total_bytes, 16 * kPageBytes);
  EXPECT_THROW(HostDevice({.memory_bytes = kPageBytes - 1}), InvalidArgument);
}

TEST_F(HostDeviceTest, AWindowIsMemoryThatTheHostReads) {
  const Pages pages(device_, kPageBytes);
  AddressRange range(device_, kPageBytes);
  range.map(0, kPageBytes, pages.handle());
  const auto bytes = test_bytes(kPageBytes, 1);
  device_->copy_to_device(range.begin(), bytes.data(), bytes.size(), kCallerStream);
  const auto* window = reinterpret_cast<const std::byte*>(range.begin());
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), window));
}

TEST_F(HostDeviceTest, WorkOfTheCallerRunsInTheCallersThreadAtOnce) {
  std::thread::id ran_in;
  device_->run([&ran_in] { ran_in = std::this_thread::get_id(); }, kCallerStream);
  EXPECT_EQ(ran_in, std::this_thread::get_id());
  EXPECT_EQ(message_of<std::runtime_error>([&] { device_->run(failing("now"), kCallerStream); }),
            "now");
  const Event event(*device_);
  device_->record(event.handle(), kCallerStream);
  EXPECT_TRUE(device_->query(event.handle()));
  device_->synchronize(event.handle());  // what was thrown at once is not kept
  device_->synchronize(kCallerStream);
}

TEST_F(HostDeviceTest, AWaitOfTheCallerBlocksAndThrowsWhatTheWorkThrew) {
  const Stream stream(*device_);
  const Event event(*device_);
  std::atomic<bool> waited = false;
  Gate gate;
  device_->run(gate.task(), stream.handle());
  device_->run(failing("lost"), stream.handle());
  device_->record(event.handle(), stream.handle());
  std::string message;
  std::thread caller([&] {
    message = message_of<std::runtime_error>([&] { device_->wait(kCallerStream, event.handle()); });
    waited = true;
  });
  EXPECT_FALSE(happens([&waited] { return waited.load(); }));
  gate.open();
  caller.join();
  EXPECT_EQ(message, "lost");
}

TEST_F(HostDeviceTest, TheCallersStreamCannotBeDestroyed) {
  EXPECT_THROW(device_->destroy_stream(kCallerStream), InvalidArgument);
}

TEST_F(HostDeviceTest, HintsOnARangeThatIsNotMappedAreRefused) {
  const AddressRange range(device_, kPageBytes);
  std::vector<std::byte> heap(kPageBytes, std::byte{7});  // would read as zeros after a `rest`
  const auto address = reinterpret_cast<Address>(heap.data());
  for (const Address place : {range.begin(), address}) {
    EXPECT_THROW(device_->prepare(place, 4096, kCallerStream), InvalidArgument);
    EXPECT_THROW(device_->rest(place, 4096, kCallerStream), InvalidArgument);
  }
  EXPECT_EQ(std::count(heap.begin(), heap.end(), std::byte{7}), kPageBytes);
}

TEST_F(HostDeviceTest, ADestroyedDeviceFinishesItsWorkFirst) {
  int ran = 0;
  {
    HostDevice device({.memory_bytes = kPageBytes});
    const StreamHandle stream = device.create_stream();
    for (int i = 0; i < 20; ++i) device.run([&ran] { ++ran; }, stream);
  }
  EXPECT_EQ(ran, 20);
}

// --- resident memory ----------------------------------------------------------------------------

TEST_F(HostDeviceTest, WindowsAtRestAddNothingToResidentMemory) {
  constexpr std::size_t kBytes = 4 * kPageBytes;
  const Pages pages(device_, kBytes);
  std::vector<std::unique_ptr<AddressRange>> windows;
  const auto use_one_more_window = [&] {
    windows.push_back(std::make_unique<AddressRange>(device_, kBytes));
    windows.back()->map(0, kBytes, pages.handle());
    device_->fill(windows.back()->begin(), 3, kBytes, kCallerStream);
    device_->prepare(windows.back()->begin(), kBytes, kCallerStream);
    const auto* window = reinterpret_cast<const volatile std::byte*>(windows.back()->begin());
    for (std::size_t i = 0; i < kBytes; i += 4096) {
      const std::byte byte = window[i];
      ASSERT_EQ(byte, std::byte{3});
    }
  };
  const auto rest = [&] { device_->rest(windows.back()->begin(), kBytes, kCallerStream); };
  use_one_more_window();
  const std::size_t in_use = resident_shared_bytes();
  rest();
  const std::size_t at_rest = resident_shared_bytes();
  // The kernel's counter may lag by some pages, far from a whole window.
  EXPECT_LT(at_rest, in_use - kBytes / 2);
  for (int i = 0; i < 32; ++i) {
    use_one_more_window();
    rest();
  }
  EXPECT_LT(resident_shared_bytes(), at_rest + kBytes / 2);
}

TEST_F(HostDeviceTest, ReleasedPagesAreGivenBackToTheSystem) {
  constexpr std::size_t kBytes = 8 * kPageBytes;
  const std::size_t before = resident_shared_bytes();
  Pages pages(device_, kBytes);
  AddressRange range(device_, kBytes);
  range.map(0, kBytes, pages.handle());
  device_->fill(range.begin(), 1, kBytes, kCallerStream);
  EXPECT_GT(resident_shared_bytes(), before + kBytes / 2);
  range.unmap(0);
  pages.release();
  EXPECT_LT(resident_shared_bytes(), before + kBytes / 2);
}

// --- delays and the link ------------------------------------------------------------------------

// Two streams that hand a buffer to and fro; returns what it holds in the end.
std::vector<std::byte> ping_pong(const HostDeviceOptions& options) {
  const auto device = std::make_shared<HostDevice>(options);
  const Pages pages(device, kPageBytes);
  AddressRange range(device, kPageBytes);
  range.map(0, kPageBytes, pages.handle());
  const Stream one(*device);
  const Stream two(*device);
  const Event from_one(*device);
  const Event from_two(*device);
  std::vector<std::byte> bytes = test_bytes(4096, 1);
  for (std::size_t round = 0; round < 20; ++round) {
    device->wait(one.handle(), from_two.handle());
    device->copy_to_device(range.begin() + round, bytes.data(), bytes.size(), one.handle());
    device->record(from_one.handle(), one.handle());
    device->wait(two.handle(), from_one.handle());
    device->fill(range.begin() + 100 * round, static_cast<std::uint8_t>(round), 50, two.handle());
    device->copy_to_host(bytes.data(), range.begin() + 2 * round, bytes.size(), two.handle());
    device->record(from_two.handle(), two.handle());
  }
  device->synchronize(from_two.handle());
  device->check_invariants();
  return bytes;
}

TEST(HostDeviceTiming, RandomDelaysChangeNoResult) {
  const auto expected = ping_pong({.memory_bytes = kPageBytes});
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_EQ(ping_pong({.memory_bytes = kPageBytes, .random_delay_us = 500, .seed = seed}),
              expected);
  }
}

// How long copies take in fact is a matter of `trae-mem bench overlap`; here is the arithmetic.
TEST(HostLinkTest, BytesTakeTheLinkOneBehindTheOther) {
  using std::chrono::milliseconds;
  HostLink link(1'000'000);
  const std::chrono::steady_clock::time_point start{};
  EXPECT_EQ(link.book(5'000, start), start + milliseconds(5));
  EXPECT_EQ(link.book(5'000, start), start + milliseconds(10));  // one bus for everyone
  EXPECT_EQ(link.book(0, start), start + milliseconds(10));
}

TEST(HostLinkTest, ALinkThatWasIdleOwesNothing) {
  using std::chrono::milliseconds;
  HostLink link(1'000'000);
  const std::chrono::steady_clock::time_point start{};
  static_cast<void>(link.book(5'000, start));
  EXPECT_EQ(link.book(2'000, start + milliseconds(50)), start + milliseconds(52));
}

TEST(HostLinkTest, ADelayThatIsExcusedMovesTheNextBeginOnce) {
  using std::chrono::milliseconds;
  HostLink link(1'000'000);
  const std::chrono::steady_clock::time_point start{};
  link.excuse(milliseconds(1));
  link.excuse(milliseconds(3));
  EXPECT_EQ(link.book(2'000, start + milliseconds(50)), start + milliseconds(48));
  EXPECT_EQ(link.book(2'000, start + milliseconds(60)), start + milliseconds(62));
}

TEST(HostLinkTest, AnExcuseFreesNoBusyLink) {
  using std::chrono::milliseconds;
  HostLink link(1'000'000);
  const std::chrono::steady_clock::time_point start{};
  static_cast<void>(link.book(20'000, start));
  link.excuse(milliseconds(5));
  EXPECT_EQ(link.book(2'000, start + milliseconds(22)), start + milliseconds(22));
}

TEST(HostLinkTest, ALongPauseIsExcusedInPartOnly) {
  using std::chrono::milliseconds;
  HostLink link(1'000'000);
  const std::chrono::steady_clock::time_point start{};
  link.excuse(milliseconds(200));
  EXPECT_EQ(link.book(2'000, start + milliseconds(300)), start + milliseconds(297));
}

TEST(HostDeviceOptionsTest, TheEnvironmentGivesTheOptions) {
  const ScopedVariable link("TRAE_MEM_HOST_LINK", "123");
  const ScopedVariable faults("TRAE_MEM_HOST_FAULTS", "copy:2");
  const ScopedVariable delay("TRAE_MEM_HOST_DELAY", "45");
  const ScopedVariable seed("TRAE_MEM_HOST_SEED", "6");
  const HostDeviceOptions options = HostDeviceOptions::from_environment();
  EXPECT_EQ(options.link_bytes_per_second, 123U);
  EXPECT_EQ(options.faults, "copy:2");
  EXPECT_EQ(options.random_delay_us, 45U);
  EXPECT_EQ(options.seed, 6U);
}

}  // namespace
}  // namespace trae_mem::test
