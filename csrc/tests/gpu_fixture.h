// For tests of one CudaDevice: the device, windows on it, copies to and fro.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/cuda_device.h"
#include "gpu_under_test.h"
#include "test_support.h"

namespace trae_mem::test {

// A mapped page.
class Window {
 public:
  explicit Window(std::shared_ptr<Device> device)
      : device_(std::move(device)), range_(device_, kPageBytes) {
    const PageHandle page = device_->create(kPageBytes);
    range_.map(0, kPageBytes, page);
    device_->release(page);  // lives while it is mapped
  }
  [[nodiscard]] Address begin() const { return range_.begin(); }

 private:
  std::shared_ptr<Device> device_;
  AddressRange range_;
};

// Bytes whose reads are preceded by a call, which may block or throw.
class HeldSource final : public ByteSource {
 public:
  HeldSource(std::function<void()> hold, std::vector<std::byte> bytes)
      : hold_(std::move(hold)), bytes_(std::move(bytes)) {}
  void read(std::size_t offset, std::span<std::byte> out) const override {
    hold_();
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
  }

 private:
  std::function<void()> hold_;
  std::vector<std::byte> bytes_;
};

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    TRAE_MEM_REQUIRE_GPU();
    // Chunks that are small against the tests' copies.
    device_ = std::make_shared<CudaDevice>(CudaDeviceOptions{.staging_bytes = 65'536});
  }
  void TearDown() override {
    if (device_ != nullptr) device_->check_invariants();
    device_.reset();
    clean_.expect_clean();
  }

  void write(Address to, const std::vector<std::byte>& bytes) {
    const Stream stream(*device_);
    device_->copy_to_device(to, bytes.data(), bytes.size(), stream.handle());
    device_->synchronize(stream.handle());
  }
  std::vector<std::byte> read(Address from, std::size_t bytes) {
    std::vector<std::byte> result(bytes);
    const Stream stream(*device_);
    device_->copy_to_host(result.data(), from, bytes, stream.handle());
    device_->synchronize(stream.handle());
    return result;
  }
  std::unique_ptr<HostBuffer> pinned_copy(const std::vector<std::byte>& bytes) {
    auto buffer = device_->allocate_host(bytes.size());
    std::copy(bytes.begin(), bytes.end(), buffer->data());
    return buffer;
  }
  void use_everything() {
    const Window window(device_);
    const auto buffer = pinned_copy(test_bytes(1000, 1));
    const Stream stream(*device_);
    const Event event(*device_, /*timed=*/true);
    device_->copy_to_device(window.begin(), buffer->data(), 1000, stream.handle());
    device_->fill(window.begin(), 1, 10, stream.handle());
    device_->run([] {}, stream.handle());
    device_->record(event.handle(), stream.handle());
    device_->wait(kCallerStream, event.handle());
    device_->synchronize(event.handle());
    static_cast<void>(device_->query(event.handle()));
    static_cast<void>(device_->time_ns(event.handle()));
    write(window.begin(), test_bytes(1000, 2));
    EXPECT_EQ(read(window.begin(), 1000), test_bytes(1000, 2));
    static_cast<void>(device_->info());
  }

  const CleanGpu clean_;
  std::shared_ptr<CudaDevice> device_;
};

}  // namespace trae_mem::test
