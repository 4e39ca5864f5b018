// What the driver facade's files share. The facade is libcuda.so.1: it converts between cuda.h's
// types and the core's, and does nothing else.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "calls.h"
#include "codes.h"
#include "streams.h"

// First line of every function: counts the call and returns where it is refused. Stringified here,
// before cuda.h's macros add a version to the name.
#define SIMGPU_ENTER(name, needs)                                        \
  static simgpu::FunctionRecord& simgpu_record = simgpu::function(name); \
  const simgpu::Call simgpu_call(simgpu_record, simgpu::Needs::needs,    \
                                 __builtin_return_address(0));           \
  if (simgpu_call.refusal() != simgpu::Code::kOk) return result(simgpu_call.refusal())

#define SIMGPU_EXPORT extern "C" __attribute__((visibility("default")))

inline CUresult result(simgpu::Code code) { return static_cast<CUresult>(code); }

inline simgpu::Handle handle_of(CUstream stream) {
  return reinterpret_cast<simgpu::Handle>(stream);
}
inline simgpu::Handle handle_of(CUevent event) { return reinterpret_cast<simgpu::Handle>(event); }

// A context's handle is its device's ordinal plus one: contexts are primary contexts.
inline CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
}
inline int device_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}
