#include "cuda_driver.h"

#include <dlfcn.h>

#include <mutex>
#include <vector>

#include "error.h"

namespace trae_mem {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
// Asked of cuGetProcAddress: the form that each function has in this version of CUDA.
constexpr int kCudaVersion = 11020;

// "a, b and 3 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

// Asks the driver itself, which knows the version of a function that is wanted, and the dynamic
// linker where the driver is older than CUDA 11.3 and cannot be asked.
CudaDriver::Resolver library_resolver(void* library) {
  using Ask = cuda::Result (*)(const char*, void**, int, unsigned long long);
  using AskV2 = cuda::Result (*)(const char*, void**, int, unsigned long long, int*);
  const auto ask_v2 = reinterpret_cast<AskV2>(dlsym(library, "cuGetProcAddress_v2"));
  const auto ask = reinterpret_cast<Ask>(dlsym(library, "cuGetProcAddress"));
  return [library, ask, ask_v2](const char* name, const char* symbol) -> void* {
    void* found = nullptr;
    int status = 0;
    if (ask_v2 != nullptr) {
      if (ask_v2(name, &found, kCudaVersion, 0, &status) == cuda::kSuccess && found != nullptr) {
        return found;
      }
    } else if (ask != nullptr) {
      if (ask(name, &found, kCudaVersion, 0) == cuda::kSuccess && found != nullptr) return found;
    }
    return dlsym(library, symbol);
  };
}

}  // namespace

CudaDriver::CudaDriver(const Resolver& resolve) {
  std::vector<std::string> missing;
  const auto find = [&](auto& function, const char* name, const char* symbol = nullptr) {
    void* found = resolve(name, symbol != nullptr ? symbol : name);
    if (found == nullptr) missing.emplace_back(name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  find(cuInit, "cuInit");
  find(cuDriverGetVersion, "cuDriverGetVersion");
  find(cuGetErrorName, "cuGetErrorName");
  find(cuGetErrorString, "cuGetErrorString");
  find(cuDeviceGetCount, "cuDeviceGetCount");
  find(cuDeviceGet, "cuDeviceGet");
  find(cuDeviceGetName, "cuDeviceGetName");
  find(cuDeviceGetAttribute, "cuDeviceGetAttribute");
  find(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2");
  find(cuCtxGetCurrent, "cuCtxGetCurrent");
  find(cuCtxPushCurrent, "cuCtxPushCurrent", "cuCtxPushCurrent_v2");
  find(cuCtxPopCurrent, "cuCtxPopCurrent", "cuCtxPopCurrent_v2");
  find(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange");
  find(cuMemGetInfo, "cuMemGetInfo", "cuMemGetInfo_v2");
  find(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity");
  find(cuMemAddressReserve, "cuMemAddressReserve");
  find(cuMemAddressFree, "cuMemAddressFree");
  find(cuMemCreate, "cuMemCreate");
  find(cuMemRelease, "cuMemRelease");
  find(cuMemMap, "cuMemMap");
  find(cuMemUnmap, "cuMemUnmap");
  find(cuMemSetAccess, "cuMemSetAccess");
  find(cuMemHostRegister, "cuMemHostRegister", "cuMemHostRegister_v2");
  find(cuMemHostUnregister, "cuMemHostUnregister");
  find(cuStreamCreateWithPriority, "cuStreamCreateWithPriority");
  find(cuStreamDestroy, "cuStreamDestroy", "cuStreamDestroy_v2");
  find(cuStreamSynchronize, "cuStreamSynchronize");
  find(cuStreamWaitEvent, "cuStreamWaitEvent");
  find(cuEventCreate, "cuEventCreate");
  find(cuEventDestroy, "cuEventDestroy", "cuEventDestroy_v2");
  find(cuEventRecord, "cuEventRecord");
  find(cuEventQuery, "cuEventQuery");
  find(cuEventSynchronize, "cuEventSynchronize");
  find(cuEventElapsedTime, "cuEventElapsedTime");
  find(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2");
  find(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2");
  find(cuMemsetD8Async, "cuMemsetD8Async");
  find(cuLaunchHostFunc, "cuLaunchHostFunc");
  if (missing.empty()) return;
  int version = 0;
  std::string found = "The driver";
  if (cuDriverGetVersion != nullptr && cuDriverGetVersion(&version) == cuda::kSuccess) {
    found = "The driver is of CUDA " + std::to_string(version / 1000) + "." +
            std::to_string(version % 1000 / 10) + " and";
  }
  throw DeviceUnavailable(found + " lacks " + listed(missing) +
                          ". Streaming to a GPU needs a driver of CUDA 11.0 or newer, for virtual "
                          "memory management: install a newer one, or use device=\"cpu\"");
}

std::shared_ptr<const CudaDriver> CudaDriver::load() {
  static std::mutex mutex;
  static std::shared_ptr<const CudaDriver> loaded;  // only when it was found: it may come later
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    // Never closed: the driver has threads and handlers of its own.
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      throw DeviceUnavailable(
          std::string("No NVIDIA driver: ") + dlerror() +
          ". Install the driver (in a container: start it with --gpus all), or use "
          "device=\"cpu\"");
    }
    loaded = std::make_shared<const CudaDriver>(library_resolver(library));
  }
  return loaded;
}

std::string CudaDriver::describe(Result error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(error, &name) != cuda::kSuccess || name == nullptr) name = "unknown error";
  if (cuGetErrorString(error, &text) != cuda::kSuccess || text == nullptr) text = "no description";
  return std::string(name) + " (" + std::to_string(error) + "): " + text;
}

bool CudaDriver::loses_context(Result error) {
  switch (error) {
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 810:  // MPS_CLIENT_TERMINATED
      return true;
    default:
      return false;
  }
}

}  // namespace trae_mem
