// A driver of our own for the tests of the driver's table: it says what a test wants to hear, and
// remembers what it was asked.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_driver.h"

namespace trae_mem::test {

// What the fake driver says; there is one, as of a real one.
struct FakeDriver {
  int version = 12040;
  int devices = 1;
  int virtual_memory = 1;
  std::size_t granularity = std::size_t{2} << 20;
  std::map<std::string, cuda::Result> results;  // other than success
  std::vector<cuda::ContextHandle> stack;       // of current contexts
  int retained = 0;
  std::vector<std::string> calls;
  std::vector<std::pair<cuda::HostFunction, void*>> host_functions;  // queued, not called
};
inline FakeDriver fake;

inline const auto kPrimary = reinterpret_cast<cuda::ContextHandle>(0x1000);
inline const auto kForeign = reinterpret_cast<cuda::ContextHandle>(0x2000);

inline cuda::Result called(const char* name) {
  fake.calls.emplace_back(name);
  const auto found = fake.results.find(name);
  return found == fake.results.end() ? cuda::kSuccess : found->second;
}

inline cuda::Result init(unsigned /*flags*/) { return called("cuInit"); }
inline cuda::Result version(int* value) {
  *value = fake.version;
  return called("cuDriverGetVersion");
}
inline cuda::Result error_name(cuda::Result error, const char** name) {
  *name = error == cuda::kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_SOME";
  return cuda::kSuccess;
}
inline cuda::Result error_string(cuda::Result /*error*/, const char** text) {
  *text = "some text";
  return cuda::kSuccess;
}
inline cuda::Result device_count(int* count) {
  *count = fake.devices;
  return called("cuDeviceGetCount");
}
inline cuda::Result device_get(cuda::DeviceNumber* device, int ordinal) {
  *device = ordinal;
  return called("cuDeviceGet");
}
inline cuda::Result device_name(char* name, int length, cuda::DeviceNumber /*device*/) {
  std::string("Fake GPU").copy(name, static_cast<std::size_t>(length));
  return called("cuDeviceGetName");
}
inline cuda::Result device_attribute(int* value, int /*attribute*/, cuda::DeviceNumber /*device*/) {
  *value = fake.virtual_memory;
  return called("cuDeviceGetAttribute");
}
inline cuda::Result retain(cuda::ContextHandle* context, cuda::DeviceNumber /*device*/) {
  *context = kPrimary;
  const cuda::Result result = called("cuDevicePrimaryCtxRetain");
  if (result == cuda::kSuccess) ++fake.retained;
  return result;
}
inline cuda::Result release(cuda::DeviceNumber /*device*/) {
  --fake.retained;
  return called("cuDevicePrimaryCtxRelease");
}
inline cuda::Result get_current(cuda::ContextHandle* context) {
  *context = fake.stack.empty() ? nullptr : fake.stack.back();
  return called("cuCtxGetCurrent");
}
inline cuda::Result push(cuda::ContextHandle context) {
  const cuda::Result result = called("cuCtxPushCurrent");
  if (result == cuda::kSuccess) fake.stack.push_back(context);
  return result;
}
inline cuda::Result pop(cuda::ContextHandle* context) {
  const cuda::Result result = called("cuCtxPopCurrent");
  if (result != cuda::kSuccess) return result;
  *context = fake.stack.back();
  fake.stack.pop_back();
  return result;
}
inline cuda::Result memory_info(std::size_t* free, std::size_t* total) {
  *free = std::size_t{1} << 30;
  *total = std::size_t{24} << 30;
  return called("cuMemGetInfo");
}
inline cuda::Result page_size(std::size_t* bytes, const cuda::AllocationProperties* /*properties*/,
                              int /*option*/) {
  *bytes = fake.granularity;
  return called("cuMemGetAllocationGranularity");
}
inline cuda::Result launch(cuda::StreamPointer /*stream*/, cuda::HostFunction function,
                           void* data) {
  const cuda::Result result = called("cuLaunchHostFunc");
  if (result == cuda::kSuccess) fake.host_functions.emplace_back(function, data);
  return result;
}
inline cuda::Result not_called() { return cuda::kUnknown; }

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

// A driver that has everything but `missing`.
inline CudaDriver::Resolver fake_functions(const std::vector<std::string>& missing = {}) {
  const std::map<std::string, void*> known = {
      {"cuInit", address(init)},
      {"cuDriverGetVersion", address(version)},
      {"cuGetErrorName", address(error_name)},
      {"cuGetErrorString", address(error_string)},
      {"cuDeviceGetCount", address(device_count)},
      {"cuDeviceGet", address(device_get)},
      {"cuDeviceGetName", address(device_name)},
      {"cuDeviceGetAttribute", address(device_attribute)},
      {"cuDevicePrimaryCtxRetain", address(retain)},
      {"cuDevicePrimaryCtxRelease", address(release)},
      {"cuCtxGetCurrent", address(get_current)},
      {"cuCtxPushCurrent", address(push)},
      {"cuCtxPopCurrent", address(pop)},
      {"cuMemGetInfo", address(memory_info)},
      {"cuMemGetAllocationGranularity", address(page_size)},
      {"cuLaunchHostFunc", address(launch)},
  };
  return [known, missing](const char* name, const char* /*symbol*/) -> void* {
    for (const std::string& absent : missing) {
      if (absent == name) return nullptr;
    }
    const auto found = known.find(name);
    return found == known.end() ? address(not_called) : found->second;
  };
}

}  // namespace trae_mem::test
