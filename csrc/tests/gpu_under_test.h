// The GPU that the tests of CudaDevice run on: the simulated one, or a real one.
//
// tools/native_tests.py builds the simulator and names its folder in TRAE_MEM_SIM_LIBRARIES; its
// driver then takes the place of the system's for the whole process. With TRAE_MEM_TEST_GPU=1 the
// same tests run on the real driver, and those that need the simulator's controls are skipped.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/cuda_device.h"

namespace trae_mem::test {

class GpuUnderTest {
 public:
  static const GpuUnderTest& instance();

  // Why there is none; empty: there is.
  [[nodiscard]] const std::string& missing() const { return missing_; }
  [[nodiscard]] bool simulated() const { return fail_ != nullptr; }
  [[nodiscard]] int count() const;

  // --- the simulator's controls, see csrc/simgpu/simgpu.h ------------------------------------
  // The nth call of the function from now on fails. 0: with the code that fits it.
  void fail(const std::string& function, std::uint64_t nth, int code = 0,
            bool sticky = false) const;
  void clear_faults() const;
  void set_adversary(std::uint64_t seed, std::uint64_t delay_us, bool poison) const;
  [[nodiscard]] std::string reports() const;  // "[]": none
  void clear_reports() const;
  // What this program holds of the simulator's objects, as JSON; empty: nothing.
  [[nodiscard]] std::string live() const;
  // Calls of a function since the last reset, or those of all functions that made the host wait.
  [[nodiscard]] std::uint64_t calls(const std::string& function) const;
  [[nodiscard]] std::uint64_t blocking_calls() const;
  void reset_calls() const;
  void abort_context(int code) const;  // as a kernel that faults does

 private:
  using Text = std::size_t (*)(char*, std::size_t);

  GpuUnderTest();
  void load_simulator(const std::string& folder);
  [[nodiscard]] static std::string text(Text function);

  std::string missing_;
  void (*fail_)(const char*, std::uint64_t, int, int, const char*) = nullptr;
  void (*clear_faults_)() = nullptr;
  void (*set_adversary_)(std::uint64_t, std::uint64_t, int) = nullptr;
  void (*clear_reports_)() = nullptr;
  void (*reset_calls_)() = nullptr;
  void (*abort_)(void*, int, const char*, const char*) = nullptr;
  Text reports_ = nullptr;
  Text live_ = nullptr;
  Text calls_ = nullptr;
};

// For SetUp: skips the test where there is no GPU, or where it needs the simulator's controls.
#define TRAE_MEM_REQUIRE_GPU()                     \
  if (!GpuUnderTest::instance().missing().empty()) \
  GTEST_SKIP() << GpuUnderTest::instance().missing()
#define TRAE_MEM_REQUIRE_SIMULATOR() \
  TRAE_MEM_REQUIRE_GPU();            \
  if (!GpuUnderTest::instance().simulated()) GTEST_SKIP() << "needs the simulated GPU's controls"

// Around a test on the simulated GPU: no faults and no delays before it; behind it no misuse was
// reported and nothing is left. Does nothing on a real GPU.
class CleanGpu {
 public:
  CleanGpu();
  void expect_clean() const;  // when all devices are gone
};

}  // namespace trae_mem::test
