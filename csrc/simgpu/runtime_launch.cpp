// libcudart.so: kernels. Compilers put calls of the __cuda* functions into every program with
// device code (crt/host_runtime.h): registration when a library is loaded, and launches. Nothing
// here can run a kernel; it is known by name, takes time in dry mode, and is reported in numeric
// mode.
#include <vector>

#include "kernels_by_address.h"
#include "runtime.h"

using simgpu::Code;

namespace {

struct Launch {
  dim3 grid;
  dim3 block;
  std::size_t shared;
  void* stream;
};

thread_local std::vector<Launch> pushed;

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  return result(simgpu::launch_opaque_kernel(simgpu::kernel_name(kernel), handle_of(stream)));
}

}  // namespace

// --- registration -------------------------------------------------------------------------------

SIMGPU_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

SIMGPU_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}

SIMGPU_EXPORT void __cudaUnregisterFatBinary(void**) {}

SIMGPU_EXPORT char __cudaInitModule(void**) { return 1; }

SIMGPU_EXPORT void __cudaRegisterFunction(void**, const char* host_function, char*,
                                          const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                          int*) {
  simgpu::add_kernel(host_function, name);
}

SIMGPU_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int,
                                     int) {}

SIMGPU_EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t,
                                            int, int) {}

SIMGPU_EXPORT void __cudaRegisterHostVar(void**, const char*, char*, std::size_t) {}

// --- launches -----------------------------------------------------------------------------------

SIMGPU_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                                   cudaStream_t stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}

SIMGPU_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared,
                                                     void* stream) {
  if (pushed.empty()) return result(Code::kInvalidValue);
  const Launch last = pushed.back();
  pushed.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

// A kernel's handle is its host function's address.
SIMGPU_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, std::size_t,
                                             cudaStream_t stream) {
  SIMGPU_ENTER("cudaLaunchKernel", kRuntimeContext);
  return launch(kernel, stream);
}

SIMGPU_EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, std::size_t,
                                           cudaStream_t stream) {
  SIMGPU_ENTER("cudaLaunchKernel", kRuntimeContext);
  return launch(kernel, stream);
}

SIMGPU_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                              const void* kernel, void**) {
  SIMGPU_ENTER("cudaLaunchKernelExC", kRuntimeContext);
  return launch(kernel, configuration->stream);
}

SIMGPU_EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**,
                                                      std::size_t, cudaStream_t stream) {
  SIMGPU_ENTER("cudaLaunchCooperativeKernel", kRuntimeContext);
  return launch(kernel, stream);
}

// --- what a kernel is said to need
// ----------------------------------------------------------------

SIMGPU_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  SIMGPU_ENTER("cudaFuncGetAttributes", kRuntimeContext);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = 80;
  attributes->ptxVersion = 80;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  SIMGPU_ENTER("cudaFuncSetAttribute", kRuntimeContext);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) {
  SIMGPU_ENTER("cudaFuncSetCacheConfig", kRuntimeContext);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*,
                                                                        int, std::size_t) {
  SIMGPU_ENTER("cudaOccupancyMaxActiveBlocksPerMultiprocessor", kRuntimeContext);
  *blocks = 2;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                                 const void*, int,
                                                                                 std::size_t,
                                                                                 unsigned int) {
  SIMGPU_ENTER("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", kRuntimeContext);
  *blocks = 2;
  return cudaSuccess;
}
