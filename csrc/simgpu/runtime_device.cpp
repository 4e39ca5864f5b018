// libcudart.so: devices, errors, versions, driver entry points.
#include <dlfcn.h>

#include <cstdio>

#include "card.h"
#include "process.h"
#include "runtime.h"

using simgpu::Code;

namespace {

thread_local Code last_error = Code::kOk;

bool exists(int device) { return device >= 0 && device < simgpu::device_count(); }

}  // namespace

cudaError_t result(Code code) {
  // As in the real runtime "not ready" is an answer; it is kept as an error nevertheless.
  if (code != Code::kOk) last_error = code;
  return static_cast<cudaError_t>(code);
}

SIMGPU_EXPORT cudaError_t cudaGetLastError(void) {
  const Code code = last_error;
  last_error = Code::kOk;
  return static_cast<cudaError_t>(code);
}

SIMGPU_EXPORT cudaError_t cudaPeekAtLastError(void) { return static_cast<cudaError_t>(last_error); }

SIMGPU_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  const simgpu::CodeText* const found = simgpu::describe(error);
  return found == nullptr ? "unrecognized error code" : found->runtime;
}

SIMGPU_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  const simgpu::CodeText* const found = simgpu::describe(error);
  return found == nullptr ? "unrecognized error code" : found->text;
}

SIMGPU_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  SIMGPU_ENTER("cudaDriverGetVersion", kNothing);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  SIMGPU_ENTER("cudaRuntimeGetVersion", kNothing);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  SIMGPU_ENTER("cudaGetDeviceCount", kNothing);
  *count = simgpu::device_count();
  return *count == 0 ? result(Code::kNoDevice) : cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGetDevice(int* device) {
  SIMGPU_ENTER("cudaGetDevice", kRuntime);
  const int current = simgpu::current_device();
  *device = current == simgpu::kNoDevice ? 0 : current;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaSetDevice(int device) {
  SIMGPU_ENTER("cudaSetDevice", kRuntime);
  if (!exists(device)) return result(Code::kInvalidDevice);
  simgpu::set_current_device(device);
  return result(simgpu::enter_runtime_context());
}

SIMGPU_EXPORT cudaError_t cudaInitDevice(int device, unsigned int, unsigned int) {
  SIMGPU_ENTER("cudaInitDevice", kRuntime);
  return result(exists(device) ? Code::kOk : Code::kInvalidDevice);
}

SIMGPU_EXPORT cudaError_t cudaSetDeviceFlags(unsigned int) {
  SIMGPU_ENTER("cudaSetDeviceFlags", kRuntime);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGetDeviceFlags(unsigned int* flags) {
  SIMGPU_ENTER("cudaGetDeviceFlags", kRuntime);
  *flags = 0;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceSynchronize(void) {
  SIMGPU_ENTER("cudaDeviceSynchronize", kRuntimeContext);
  return result(simgpu::synchronize_current_device());
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  SIMGPU_ENTER("cudaDeviceGetAttribute", kRuntime);
  if (!exists(device)) return result(Code::kInvalidDevice);
  return result(simgpu::card_attribute(value, attribute, device));
}

namespace {

int attribute(cudaDeviceAttr wanted, int device) {
  int value = 0;
  simgpu::card_attribute(&value, wanted, device);
  return value;
}

}  // namespace

// Only what CUDA 12 and 13 both have, and PyTorch shows or uses.
SIMGPU_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  SIMGPU_ENTER("cudaGetDeviceProperties", kRuntime);
  if (!exists(device)) return result(Code::kInvalidDevice);
  const auto size = [device](cudaDeviceAttr wanted) {
    return static_cast<std::size_t>(attribute(wanted, device));
  };
  *out = {};
  std::snprintf(out->name, sizeof out->name, "%s", simgpu::card_name().c_str());
  simgpu::card_uuid(device, reinterpret_cast<unsigned char*>(out->uuid.bytes));
  out->totalGlobalMem = simgpu::card_memory(device);
  out->major = simgpu::card_major();
  out->minor = simgpu::card_minor();
  out->multiProcessorCount = simgpu::card_multiprocessors();
  out->warpSize = attribute(cudaDevAttrWarpSize, device);
  out->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock, device);
  out->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
  out->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor, device);
  out->maxThreadsDim[0] = attribute(cudaDevAttrMaxBlockDimX, device);
  out->maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimY, device);
  out->maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ, device);
  out->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX, device);
  out->maxGridSize[1] = attribute(cudaDevAttrMaxGridDimY, device);
  out->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimZ, device);
  out->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock, device);
  out->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor, device);
  out->sharedMemPerBlock = size(cudaDevAttrMaxSharedMemoryPerBlock);
  out->sharedMemPerBlockOptin = size(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  out->sharedMemPerMultiprocessor = size(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  out->reservedSharedMemPerBlock = size(cudaDevAttrReservedSharedMemoryPerBlock);
  out->totalConstMem = size(cudaDevAttrTotalConstantMemory);
  out->textureAlignment = size(cudaDevAttrTextureAlignment);
  out->memPitch = size(cudaDevAttrMaxPitch);
  out->l2CacheSize = attribute(cudaDevAttrL2CacheSize, device);
  out->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
  out->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount, device);
  out->concurrentKernels = attribute(cudaDevAttrConcurrentKernels, device);
  out->unifiedAddressing = attribute(cudaDevAttrUnifiedAddressing, device);
  out->canMapHostMemory = attribute(cudaDevAttrCanMapHostMemory, device);
  out->streamPrioritiesSupported = attribute(cudaDevAttrStreamPrioritiesSupported, device);
  out->hostRegisterSupported = attribute(cudaDevAttrHostRegisterSupported, device);
  out->cooperativeLaunch = attribute(cudaDevAttrCooperativeLaunch, device);
  out->pciBusID = attribute(cudaDevAttrPciBusId, device);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  SIMGPU_ENTER("cudaDeviceGetPCIBusId", kRuntime);
  if (!exists(device) || size <= 0) return result(Code::kInvalidValue);
  std::snprintf(id, static_cast<std::size_t>(size), "%s", simgpu::card_bus_id(device).c_str());
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  SIMGPU_ENTER("cudaDeviceGetByPCIBusId", kRuntime);
  *device = simgpu::card_with_bus_id(id);
  return result(*device < 0 ? Code::kInvalidValue : Code::kOk);
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  SIMGPU_ENTER("cudaDeviceGetStreamPriorityRange", kRuntimeContext);
  if (least != nullptr) *least = simgpu::kLowestPriority;
  if (greatest != nullptr) *greatest = simgpu::kHighestPriority;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  SIMGPU_ENTER("cudaDeviceCanAccessPeer", kRuntime);
  *can = 0;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit) {
  SIMGPU_ENTER("cudaDeviceGetLimit", kRuntimeContext);
  *value = 1024;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceSetLimit(cudaLimit, std::size_t) {
  SIMGPU_ENTER("cudaDeviceSetLimit", kRuntimeContext);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

SIMGPU_EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

// --- driver entry points ------------------------------------------------------------------------

namespace {

using GetProcAddress = int (*)(const char*, void**, int, unsigned long long, int*);

// The simulated driver stands beside this library; the process has it already.
GetProcAddress driver_lookup() {
  static const auto found = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver == nullptr
               ? nullptr
               : reinterpret_cast<GetProcAddress>(dlsym(driver, "cuGetProcAddress_v2"));
  }();
  return found;
}

cudaError_t entry_point(const char* name, void** function, unsigned int version,
                        unsigned long long flags, cudaDriverEntryPointQueryResult* status) {
  const GetProcAddress lookup = driver_lookup();
  int found = 1;
  *function = nullptr;
  if (lookup != nullptr) lookup(name, function, static_cast<int>(version), flags, &found);
  if (status != nullptr) *status = static_cast<cudaDriverEntryPointQueryResult>(found);
  return cudaSuccess;
}

}  // namespace

SIMGPU_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned int version, unsigned long long flags,
    cudaDriverEntryPointQueryResult* status) {
  SIMGPU_ENTER("cudaGetDriverEntryPointByVersion", kNothing);
  return entry_point(name, function, version, flags, status);
}

#if CUDART_VERSION < 13000
SIMGPU_EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function,
                                                  unsigned long long flags,
                                                  cudaDriverEntryPointQueryResult* status) {
  SIMGPU_ENTER("cudaGetDriverEntryPoint", kNothing);
  return entry_point(name, function, CUDART_VERSION, flags, status);
}
#endif
