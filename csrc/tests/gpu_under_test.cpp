#include "gpu_under_test.h"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "core/cuda_driver.h"
#include "core/error.h"

namespace trae_mem::test {
namespace {

template <typename Function>
void find(void* library, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("libsimgpu.so lacks ") + name);
}

// The number behind `key` in JSON text, from `position` on; 0 if it is not there.
std::uint64_t number_behind(const std::string& text, const std::string& key, std::size_t position) {
  const std::size_t found = text.find(key, position);
  return found == std::string::npos ? 0 : std::stoull(text.substr(found + key.size()));
}

}  // namespace

const GpuUnderTest& GpuUnderTest::instance() {
  static const GpuUnderTest gpu;
  return gpu;
}

GpuUnderTest::GpuUnderTest() {
  if (std::getenv("TRAE_MEM_TEST_GPU") != nullptr) {
    try {
      const CudaDevice device({});
    } catch (const Error& error) {
      missing_ = std::string("TRAE_MEM_TEST_GPU is set, but: ") + error.what();
    }
    return;
  }
  const char* folder = std::getenv("TRAE_MEM_SIM_LIBRARIES");
  const char* reason = std::getenv("TRAE_MEM_SIM_MISSING");
  if (folder != nullptr) {
    load_simulator(folder);
  } else {
    missing_ = reason != nullptr ? reason
                                 : "no simulated GPU: TRAE_MEM_SIM_LIBRARIES is not set; "
                                   "tools/native_tests.py sets it";
  }
}

void GpuUnderTest::load_simulator(const std::string& folder) {
  const auto open = [&folder](const char* name) {
    void* library = dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return library;
  };
  void* simulator = open("libsimgpu.so");
  open("libcuda.so.1");  // found by this name from now on
  find(simulator, clear_faults_, "simgpu_clear_faults");
  find(simulator, set_adversary_, "simgpu_set_adversary");
  find(simulator, clear_reports_, "simgpu_clear_reports");
  find(simulator, reset_calls_, "simgpu_reset_calls");
  find(simulator, abort_, "simgpu_abort");
  reports_ = reinterpret_cast<Text>(dlsym(simulator, "simgpu_reports"));
  live_ = reinterpret_cast<Text>(dlsym(simulator, "simgpu_live"));
  calls_ = reinterpret_cast<Text>(dlsym(simulator, "simgpu_calls"));
  find(simulator, fail_, "simgpu_fail");
}

int GpuUnderTest::count() const {
  int devices = 0;
  const auto driver = CudaDriver::load();
  if (driver->cuInit(0) != cuda::kSuccess) return 0;
  return driver->cuDeviceGetCount(&devices) == cuda::kSuccess ? devices : 0;
}

void GpuUnderTest::fail(const std::string& function, std::uint64_t nth, int code,
                        bool sticky) const {
  fail_(function.c_str(), nth, code, sticky ? 1 : 0, "native_tests");
}

void GpuUnderTest::clear_faults() const {
  if (simulated()) clear_faults_();
}

void GpuUnderTest::set_adversary(std::uint64_t seed, std::uint64_t delay_us, bool poison) const {
  if (simulated()) set_adversary_(seed, delay_us, poison ? 1 : 0);
}

std::string GpuUnderTest::text(Text function) {
  std::vector<char> buffer(4096);
  for (;;) {
    const std::size_t needed = function(buffer.data(), buffer.size());
    if (needed <= buffer.size()) return buffer.data();
    buffer.resize(needed + 1024);
  }
}

std::string GpuUnderTest::reports() const { return simulated() ? text(reports_) : "[]"; }

void GpuUnderTest::clear_reports() const {
  if (simulated()) clear_reports_();
}

std::string GpuUnderTest::live() const {
  if (!simulated()) return "";
  const std::string all = text(live_);
  const std::size_t ours = all.find("native_tests");
  return ours == std::string::npos ? "" : all.substr(ours, all.find('}', ours) - ours);
}

std::uint64_t GpuUnderTest::calls(const std::string& function) const {
  const std::string all = text(calls_);
  const std::size_t found = all.find("\"" + function + "\"");
  return found == std::string::npos ? 0 : number_behind(all, "\"count\": ", found);
}

std::uint64_t GpuUnderTest::blocking_calls() const {
  const std::string all = text(calls_);
  const std::string key = "\"blocking\": ";
  std::uint64_t sum = 0;
  for (std::size_t at = all.find(key); at != std::string::npos; at = all.find(key, at + 1)) {
    sum += number_behind(all, key, at);
  }
  return sum;
}

void GpuUnderTest::reset_calls() const { reset_calls_(); }

void GpuUnderTest::abort_context(int code) const {
  abort_(nullptr, code, "kernel error", "asked for by a test");
}

CleanGpu::CleanGpu() {
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  if (!gpu.missing().empty()) return;
  gpu.clear_faults();
  gpu.set_adversary(0, 0, false);
  gpu.clear_reports();
}

void CleanGpu::expect_clean() const {
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  if (!gpu.missing().empty()) return;
  EXPECT_EQ(gpu.reports(), "[]");
  EXPECT_EQ(gpu.live(), "");
  gpu.clear_faults();
  gpu.set_adversary(0, 0, false);
  gpu.clear_reports();
}

}  // namespace trae_mem::test
