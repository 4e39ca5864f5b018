// The rules of device.h as tests that run against any Device.
//
// A device joins with one INSTANTIATE_TEST_SUITE_P of a DeviceCase in its own test file
// (host_device_test.cpp, cuda_conformance_test.cpp). The tests touch device memory through copies
// only, never through pointers, and hold streams with gates: nothing depends on how fast a device
// is.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/device.h"
#include "core/error.h"
#include "gpu_under_test.h"
#include "test_support.h"

namespace trae_mem::test {

struct DeviceWishes {
  std::size_t memory_bytes = 16 * kPageBytes;
  std::string faults;  // as fault_plan.h reads it
};

struct DeviceCase {
  std::string name;
  std::function<std::shared_ptr<Device>(const DeviceWishes&)> make;
  std::function<void(const Device&)> check_invariants;  // throws Error
  std::vector<std::string> fallible;                    // the operations that wishes can fail
  // Why it cannot be tested here; empty: it can.
  std::function<std::string()> missing = [] { return std::string(); };
  // What a stream holds up does not hold up the host work of others. NVIDIA's driver may run that
  // of all streams one behind the other.
  bool host_work_side_by_side = true;
};

inline void PrintTo(const DeviceCase& device, std::ostream* out) { *out << device.name; }

inline std::string case_name(const ::testing::TestParamInfo<DeviceCase>& info) {
  return info.param.name;
}

// A physical handle, released with its scope unless the test did.
class Pages {
 public:
  Pages(std::shared_ptr<Device> device, std::size_t bytes)
      : device_(std::move(device)), handle_(device_->create(bytes)) {}
  ~Pages() {
    if (!released_) device_->release(handle_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  [[nodiscard]] PageHandle handle() const { return handle_; }
  void release() {
    device_->release(handle_);
    released_ = true;
  }

 private:
  std::shared_ptr<Device> device_;
  PageHandle handle_;
  bool released_ = false;
};

class DeviceConformance : public ::testing::TestWithParam<DeviceCase> {
 protected:
  void SetUp() override {
    if (const std::string reason = GetParam().missing(); !reason.empty()) GTEST_SKIP() << reason;
    make_device({});
  }

  void make_device(const DeviceWishes& wishes) {
    probe_.reset();
    device_.reset();
    device_ = GetParam().make(wishes);
  }

  void TearDown() override {
    if (device_ == nullptr) return;
    GetParam().check_invariants(*device_);
    EXPECT_EQ(device_->info().used_bytes, 0U) << "the test leaked physical memory";
    probe_.reset();
    device_.reset();
    clean_.expect_clean();
  }

  // A range with one handle mapped all over it.
  std::unique_ptr<AddressRange> mapped(std::size_t bytes, PageHandle handle) {
    auto range = std::make_unique<AddressRange>(device_, bytes);
    range->map(0, bytes, handle);
    return range;
  }

  void write(Address to, const std::vector<std::byte>& bytes) {
    device_->copy_to_device(to, bytes.data(), bytes.size(), probe());
    device_->synchronize(probe());
  }

  std::vector<std::byte> read(Address from, std::size_t bytes) {
    std::vector<std::byte> result(bytes);
    device_->copy_to_host(result.data(), from, bytes, probe());
    device_->synchronize(probe());
    return result;
  }

  // Waits for all work of the stream and throws what it threw.
  void finish(StreamHandle stream) {
    const Event event(*device_);
    device_->record(event.handle(), stream);
    device_->synchronize(event.handle());
  }

  StreamHandle probe() {
    if (!probe_.has_value()) probe_.emplace(*device_);
    return probe_->handle();
  }

  const CleanGpu clean_;
  std::shared_ptr<Device> device_;

 private:
  std::optional<Stream> probe_;  // what write and read use
};

inline std::function<void()> failing(std::string message) {
  return [message = std::move(message)] { throw std::runtime_error(message); };
}

// A source that produces `bytes` and remembers what was asked of it.
class VectorSource final : public ByteSource {
 public:
  explicit VectorSource(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  void read(std::size_t offset, std::span<std::byte> out) const override {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = bytes_.at(offset + i);
    bytes_read_ += out.size();
  }
  [[nodiscard]] std::size_t bytes_read() const {
    const std::lock_guard lock(mutex_);
    return bytes_read_;
  }

 private:
  std::vector<std::byte> bytes_;
  mutable std::mutex mutex_;
  mutable std::size_t bytes_read_ = 0;
};

}  // namespace trae_mem::test
