// What the runtime facade's files share. The facade is libcudart.so: it converts between the
// runtime's types and the core's, and keeps each thread's last error.
//
// Declarations of functions whose signature differs between CUDA 12 and 13 stand under
// CUDART_VERSION; a build serves the version that the installed PyTorch uses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "calls.h"
#include "codes.h"
#include "streams.h"

// First line of every function: counts the call and returns where it is refused.
#define SIMGPU_ENTER(name, needs)                                        \
  static simgpu::FunctionRecord& simgpu_record = simgpu::function(name); \
  const simgpu::Call simgpu_call(simgpu_record, simgpu::Needs::needs,    \
                                 __builtin_return_address(0));           \
  if (simgpu_call.refusal() != simgpu::Code::kOk) return result(simgpu_call.refusal())

#define SIMGPU_EXPORT extern "C" __attribute__((visibility("default")))

// The code as the runtime returns it; an error stays this thread's last one until it is asked for.
cudaError_t result(simgpu::Code code);

inline simgpu::Handle handle_of(cudaStream_t stream) {
  return reinterpret_cast<simgpu::Handle>(stream);
}
inline simgpu::Handle handle_of(cudaEvent_t event) {
  return reinterpret_cast<simgpu::Handle>(event);
}
inline std::uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}
