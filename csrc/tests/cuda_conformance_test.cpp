// CudaDevice runs the conformance suite of all devices: on each of two GPUs, plain and with the
// simulator's delays.
#include <map>

#include "core/cuda_device.h"
#include "device_conformance.h"
#include "gpu_under_test.h"

namespace trae_mem::test {
namespace {

constexpr int kFault = cuda::kUnknown;

// "copy:2" as the simulator takes it.
void plan_faults(const std::string& faults) {
  static const std::map<std::string, const char*> kFunctions = {
      {"reserve", "cuMemAddressReserve"},
      {"create", "cuMemCreate"},
      {"map", "cuMemMap"},
      {"create_stream", "cuStreamCreateWithPriority"},
      {"create_event", "cuEventCreate"},
      {"record", "cuEventRecord"},
      {"wait", "cuStreamWaitEvent"},
      {"copy", "cuMemcpyHtoDAsync"},
  };
  const std::size_t colon = faults.find(':');
  GpuUnderTest::instance().fail(kFunctions.at(faults.substr(0, colon)),
                                std::stoull(faults.substr(colon + 1)), kFault);
}

DeviceCase cuda_case(const std::string& name, int index, std::uint64_t delay_us) {
  const auto make = [index, delay_us](const DeviceWishes& wishes) {
    GpuUnderTest::instance().clear_faults();
    // Without poison, which spoils what a handle holds while it is not mapped.
    GpuUnderTest::instance().set_adversary(7, delay_us, /*poison=*/false);
    // Chunks that do not divide the tests' sizes.
    auto device = std::make_shared<CudaDevice>(CudaDeviceOptions{
        .index = index, .memory_bytes = wishes.memory_bytes, .staging_bytes = 700'000});
    if (!wishes.faults.empty()) plan_faults(wishes.faults);
    return device;
  };
  const auto check = [](const Device& device) {
    dynamic_cast<const CudaDevice&>(device).check_invariants();
  };
  const auto missing = [index, delay_us]() -> std::string {
    const GpuUnderTest& gpu = GpuUnderTest::instance();
    if (!gpu.missing().empty()) return gpu.missing();
    if (delay_us > 0 && !gpu.simulated()) return "delays need the simulated GPU";
    if (index >= gpu.count()) return "needs GPU " + std::to_string(index);
    return "";
  };
  const bool simulated = GpuUnderTest::instance().simulated();
  std::vector<std::string> fallible;
  if (simulated) {
    fallible = {"reserve",      "create", "map",  "create_stream",
                "create_event", "record", "wait", "copy"};
  }
  return {name, make, check, fallible, missing, simulated};
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformance,
                         ::testing::Values(cuda_case("first_gpu", 0, 0),
                                           cuda_case("second_gpu", 1, 0),
                                           cuda_case("first_gpu_delays", 0, 300),
                                           cuda_case("second_gpu_delays", 1, 300)),
                         case_name);

}  // namespace
}  // namespace trae_mem::test
