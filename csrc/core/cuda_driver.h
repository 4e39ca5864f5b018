// The NVIDIA driver's functions, found in libcuda.so.1 when they are first needed.
//
// The core is built without a CUDA header, so that one build serves machines with and without a
// GPU. The few types and constants below are those of cuda.h; the driver's binary interface does
// not change (a function that does gets a new symbol, "_v2").
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace trae_mem {

namespace cuda {  // the names and values of cuda.h

using Result = int;                        // CUresult
using DeviceNumber = int;                  // CUdevice
using DevicePointer = unsigned long long;  // CUdeviceptr
using Allocation = unsigned long long;     // CUmemGenericAllocationHandle
using ContextHandle = struct ContextTag*;  // CUcontext
using StreamPointer = struct StreamTag*;   // CUstream
using EventPointer = struct EventTag*;     // CUevent
using HostFunction = void (*)(void*);      // CUhostFn

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kStubLibrary = 34;
inline constexpr Result kDeviceUnavailable = 46;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kSystemDriverMismatch = 803;
inline constexpr Result kUnknown = 999;

inline constexpr int kVirtualMemoryManagementSupported = 102;  // CUdevice_attribute
inline constexpr unsigned kStreamNonBlocking = 1;              // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDefault = 0;                   // CU_EVENT_DEFAULT
inline constexpr unsigned kEventDisableTiming = 2;             // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kHostRegisterPortable = 1;           // CU_MEMHOSTREGISTER_PORTABLE

struct Location {  // CUmemLocation
  int type = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
  int id = 0;
};

struct AllocationProperties {  // CUmemAllocationProp
  int type = 1;                // CU_MEM_ALLOCATION_TYPE_PINNED
  int requested_handle_types = 0;
  Location location;
  void* win32_handle_metadata = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags{};
};

struct AccessDescription {  // CUmemAccessDesc
  Location location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

}  // namespace cuda

// The functions that the core calls, named as in cuda.h. All of them exist since CUDA 11.0.
struct CudaFunctions {
  using Result = cuda::Result;
  Result (*cuInit)(unsigned flags) = nullptr;
  Result (*cuDriverGetVersion)(int* version) = nullptr;
  Result (*cuGetErrorName)(Result error, const char** name) = nullptr;
  Result (*cuGetErrorString)(Result error, const char** text) = nullptr;
  Result (*cuDeviceGetCount)(int* count) = nullptr;
  Result (*cuDeviceGet)(cuda::DeviceNumber* device, int ordinal) = nullptr;
  Result (*cuDeviceGetName)(char* name, int length, cuda::DeviceNumber device) = nullptr;
  Result (*cuDeviceGetAttribute)(int* value, int attribute, cuda::DeviceNumber device) = nullptr;
  Result (*cuDevicePrimaryCtxRetain)(cuda::ContextHandle* context,
                                     cuda::DeviceNumber device) = nullptr;
  Result (*cuDevicePrimaryCtxRelease)(cuda::DeviceNumber device) = nullptr;
  Result (*cuCtxGetCurrent)(cuda::ContextHandle* context) = nullptr;
  Result (*cuCtxPushCurrent)(cuda::ContextHandle context) = nullptr;
  Result (*cuCtxPopCurrent)(cuda::ContextHandle* context) = nullptr;
  Result (*cuCtxGetStreamPriorityRange)(int* least, int* greatest) = nullptr;
  Result (*cuMemGetInfo)(std::size_t* free, std::size_t* total) = nullptr;
  Result (*cuMemGetAllocationGranularity)(std::size_t* granularity,
                                          const cuda::AllocationProperties* properties,
                                          int option) = nullptr;
  Result (*cuMemAddressReserve)(cuda::DevicePointer* address, std::size_t bytes,
                                std::size_t alignment, cuda::DevicePointer wish,
                                unsigned long long flags) = nullptr;
  Result (*cuMemAddressFree)(cuda::DevicePointer address, std::size_t bytes) = nullptr;
  Result (*cuMemCreate)(cuda::Allocation* allocation, std::size_t bytes,
                        const cuda::AllocationProperties* properties,
                        unsigned long long flags) = nullptr;
  Result (*cuMemRelease)(cuda::Allocation allocation) = nullptr;
  Result (*cuMemMap)(cuda::DevicePointer address, std::size_t bytes, std::size_t offset,
                     cuda::Allocation allocation, unsigned long long flags) = nullptr;
  Result (*cuMemUnmap)(cuda::DevicePointer address, std::size_t bytes) = nullptr;
  Result (*cuMemSetAccess)(cuda::DevicePointer address, std::size_t bytes,
                           const cuda::AccessDescription* access, std::size_t count) = nullptr;
  Result (*cuMemHostRegister)(void* memory, std::size_t bytes, unsigned flags) = nullptr;
  Result (*cuMemHostUnregister)(void* memory) = nullptr;
  Result (*cuStreamCreateWithPriority)(cuda::StreamPointer* stream, unsigned flags,
                                       int priority) = nullptr;
  Result (*cuStreamDestroy)(cuda::StreamPointer stream) = nullptr;
  Result (*cuStreamSynchronize)(cuda::StreamPointer stream) = nullptr;
  Result (*cuStreamWaitEvent)(cuda::StreamPointer stream, cuda::EventPointer event,
                              unsigned flags) = nullptr;
  Result (*cuEventCreate)(cuda::EventPointer* event, unsigned flags) = nullptr;
  Result (*cuEventDestroy)(cuda::EventPointer event) = nullptr;
  Result (*cuEventRecord)(cuda::EventPointer event, cuda::StreamPointer stream) = nullptr;
  Result (*cuEventQuery)(cuda::EventPointer event) = nullptr;
  Result (*cuEventSynchronize)(cuda::EventPointer event) = nullptr;
  Result (*cuEventElapsedTime)(float* milliseconds, cuda::EventPointer begin,
                               cuda::EventPointer end) = nullptr;
  Result (*cuMemcpyHtoDAsync)(cuda::DevicePointer to, const void* from, std::size_t bytes,
                              cuda::StreamPointer stream) = nullptr;
  Result (*cuMemcpyDtoHAsync)(void* to, cuda::DevicePointer from, std::size_t bytes,
                              cuda::StreamPointer stream) = nullptr;
  Result (*cuMemsetD8Async)(cuda::DevicePointer to, unsigned char value, std::size_t bytes,
                            cuda::StreamPointer stream) = nullptr;
  Result (*cuLaunchHostFunc)(cuda::StreamPointer stream, cuda::HostFunction function,
                             void* data) = nullptr;
};

class CudaDriver : public CudaFunctions {
 public:
  // The address of a function, null if the driver lacks it. `name` is that of cuda.h, `symbol` that
  // of the library, which may end in "_v2".
  using Resolver = std::function<void*(const char* name, const char* symbol)>;

  // Throws DeviceUnavailable that names what is missing.
  explicit CudaDriver(const Resolver& resolve);
  // The one of this machine; loaded once. Throws DeviceUnavailable where there is none.
  static std::shared_ptr<const CudaDriver> load();

  // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
  [[nodiscard]] std::string describe(Result error) const;
  // Every later call of the process fails with it too: a kernel faulted, the GPU fell off the bus.
  [[nodiscard]] static bool loses_context(Result error);
  // For calls that give something back, whose owner cannot be told of a failure: a second attempt
  // after an error that may pass. Returns the last attempt's result.
  template <typename Call>
  static Result insist(const Call& call) {
    const Result first = call();
    const bool hopeless = first == cuda::kSuccess || first == cuda::kDeinitialized ||
                          first == cuda::kNotInitialized || first == cuda::kInvalidHandle ||
                          first == cuda::kInvalidContext || loses_context(first);
    return hopeless ? first : call();
  }
};

}  // namespace trae_mem
