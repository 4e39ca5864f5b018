// Copies, fills and sources: exact bytes at every offset, across mappings, in stream order.
#include <algorithm>
#include <random>

#include "device_conformance.h"

namespace trae_mem::test {
namespace {

constexpr std::size_t kPage = kPageBytes;

// Three pages whose addresses follow each other and whose memory does not.
class ScatteredPages {
 public:
  explicit ScatteredPages(const std::shared_ptr<Device>& device)
      : first_(device, kPage), second_(device, kPage), third_(device, kPage) {
    range_ = std::make_unique<AddressRange>(device, 3 * kPage);
    range_->map(0, kPage, third_.handle());
    range_->map(kPage, kPage, first_.handle());
    range_->map(2 * kPage, kPage, second_.handle());
  }
  [[nodiscard]] Address begin() const { return range_->begin(); }

 private:
  Pages first_;
  Pages second_;
  Pages third_;
  std::unique_ptr<AddressRange> range_;
};

TEST_P(DeviceConformance, CopiesCrossTheBordersOfMappings) {
  const ScatteredPages memory(device_);
  const auto bytes = test_bytes(3 * kPage, 1);
  write(memory.begin(), bytes);
  EXPECT_EQ(read(memory.begin(), bytes.size()), bytes);
  const auto border = read(memory.begin() + kPage - 7, 14);
  EXPECT_TRUE(std::equal(border.begin(), border.end(), bytes.begin() + kPage - 7));
}

TEST_P(DeviceConformance, CopiesChangeExactlyTheirBytes) {
  const ScatteredPages memory(device_);
  auto expected = test_bytes(3 * kPage, 2);
  write(memory.begin(), expected);
  std::mt19937_64 random(11);
  for (int i = 0; i < 30; ++i) {
    const std::size_t offset = random() % expected.size();
    const std::size_t longest = i % 2 == 0 ? 100 : expected.size();
    const std::size_t bytes = std::min(random() % longest, expected.size() - offset);
    const auto patch = test_bytes(bytes, random());
    write(memory.begin() + offset, patch);
    std::copy(patch.begin(), patch.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  EXPECT_EQ(read(memory.begin(), expected.size()), expected);
}

TEST_P(DeviceConformance, FillsChangeExactlyTheirBytes) {
  const ScatteredPages memory(device_);
  auto expected = test_bytes(3 * kPage, 3);
  write(memory.begin(), expected);
  device_->fill(memory.begin() + 5, 0xFF, 2 * kPage + 1, probe());
  device_->fill(memory.begin() + kPage, 0x12, 1, probe());
  std::fill_n(expected.begin() + 5, 2 * kPage + 1, std::byte{0xFF});
  expected[kPage] = std::byte{0x12};
  EXPECT_EQ(read(memory.begin(), expected.size()), expected);
}

TEST_P(DeviceConformance, CopiesAndFillsKeepTheOrderOfTheirStream) {
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  const auto bytes = test_bytes(kPage, 4);
  std::vector<std::byte> first(kPage);
  std::vector<std::byte> second(kPage);
  const Stream stream(*device_);
  device_->fill(range->begin(), 0xEE, kPage, stream.handle());
  device_->copy_to_host(first.data(), range->begin(), kPage, stream.handle());
  device_->copy_to_device(range->begin(), bytes.data(), kPage, stream.handle());
  device_->copy_to_host(second.data(), range->begin(), kPage, stream.handle());
  device_->synchronize(stream.handle());
  EXPECT_EQ(first, std::vector<std::byte>(kPage, std::byte{0xEE}));
  EXPECT_EQ(second, bytes);
}

TEST_P(DeviceConformance, ACopyWaitsForTheWorkBeforeIt) {
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  const Stream stream(*device_);
  auto bytes = test_bytes(kPage, 5);
  const auto later = test_bytes(kPage, 6);
  // The source is read when the copy runs, which is behind the work that changes it.
  device_->run([&] { bytes = later; }, stream.handle());
  device_->copy_to_device(range->begin(), bytes.data(), kPage, stream.handle());
  device_->synchronize(stream.handle());
  EXPECT_EQ(read(range->begin(), kPage), later);
}

TEST_P(DeviceConformance, EmptyWorkIsNoWork) {
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  const auto bytes = test_bytes(kPage, 7);
  write(range->begin(), bytes);
  device_->copy_to_device(range->begin(), nullptr, 0, probe());
  device_->copy_to_host(nullptr, range->begin(), 0, probe());
  device_->fill(range->begin(), 0, 0, probe());
  EXPECT_EQ(read(range->begin(), kPage), bytes);
}

TEST_P(DeviceConformance, WorkOnARangeThatIsNotMappedIsRefusedAtOnce) {
  const Pages pages(device_, kPage);
  AddressRange range(device_, 3 * kPage);
  range.map(kPage, kPage, pages.handle());
  std::vector<std::byte> bytes(2 * kPage);
  const auto source = std::make_shared<VectorSource>(bytes);
  for (const std::size_t offset : {std::size_t{0}, kPage}) {
    const Address from = range.begin() + offset;
    EXPECT_THROW(device_->copy_to_device(from, bytes.data(), 2 * kPage, probe()), InvalidArgument);
    EXPECT_THROW(device_->copy_to_device(from, source, 2 * kPage, probe()), InvalidArgument);
    EXPECT_THROW(device_->copy_to_host(bytes.data(), from, 2 * kPage, probe()), InvalidArgument);
    EXPECT_THROW(device_->fill(from, 0, 2 * kPage, probe()), InvalidArgument);
  }
  finish(probe());  // nothing was queued
}

TEST_P(DeviceConformance, ASourceFillsItsRangeAndEachByteIsAskedForOnce) {
  const ScatteredPages memory(device_);
  auto expected = test_bytes(3 * kPage, 8);
  write(memory.begin(), expected);
  const auto bytes = test_bytes(2 * kPage + 100, 9);
  const auto source = std::make_shared<VectorSource>(bytes);
  device_->copy_to_device(memory.begin() + 300, source, bytes.size(), probe());
  device_->synchronize(probe());
  std::copy(bytes.begin(), bytes.end(), expected.begin() + 300);
  EXPECT_EQ(read(memory.begin(), expected.size()), expected);
  EXPECT_EQ(source->bytes_read(), bytes.size());
}

TEST_P(DeviceConformance, ASourceLivesUntilItsCopyIsDoneAndNoLonger) {
  class HeldSource final : public ByteSource {
   public:
    HeldSource(std::function<void()> hold, std::vector<std::byte> bytes)
        : hold_(std::move(hold)), bytes_(std::move(bytes)) {}
    void read(std::size_t offset, std::span<std::byte> out) const override {
      hold_();
      bytes_.read(offset, out);
    }

   private:
    std::function<void()> hold_;
    VectorSource bytes_;
  };
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  const auto bytes = test_bytes(kPage, 10);
  const Stream stream(*device_);
  Gate gate;
  auto source = std::make_shared<HeldSource>(gate.task(), bytes);
  const std::weak_ptr<HeldSource> watched = source;
  device_->copy_to_device(range->begin(), std::move(source), kPage, stream.handle());
  source.reset();
  EXPECT_FALSE(watched.expired());
  gate.open();
  device_->synchronize(stream.handle());
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(read(range->begin(), kPage), bytes);
}

TEST_P(DeviceConformance, WhatASourceThrowsIsReportedByTheNextEvent) {
  class FailingSource final : public ByteSource {
   public:
    void read(std::size_t /*offset*/, std::span<std::byte> /*out*/) const override {
      throw FileError("file.safetensors is gone");
    }
  };
  const Pages pages(device_, kPage);
  const auto range = mapped(kPage, pages.handle());
  device_->copy_to_device(range->begin(), std::make_shared<FailingSource>(), kPage, probe());
  EXPECT_EQ(message_of<FileError>([&] { finish(probe()); }), "file.safetensors is gone");
  const auto bytes = test_bytes(kPage, 11);
  write(range->begin(), bytes);
  EXPECT_EQ(read(range->begin(), kPage), bytes);
}

}  // namespace
}  // namespace trae_mem::test
