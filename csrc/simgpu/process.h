// The process's relation to the simulated driver: whether it is initialised, whether this is a
// forked child or a process that is ending, and which context is current in each thread.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

#include "codes.h"

namespace simgpu {

// The one object of its type, never destroyed: streams' threads and the application's own static
// objects use it until the process is gone. It stands in static memory, where leak checkers look.
template <typename T, typename... Arguments>
T& immortal(Arguments&&... arguments) {
  alignas(T) static unsigned char place[sizeof(T)];
  return *::new (static_cast<void*>(place)) T{std::forward<Arguments>(arguments)...};
}

SIMGPU_API Code initialize();  // cuInit; again: nothing
SIMGPU_API bool initialized();

// A child of a process that had initialised the driver: the driver serves it nothing.
bool in_forked_child();
// kDeinitialized while the process ends, kNotPermitted in a host function.
Code process_refusal();

// --- contexts: each device has one, its primary context; a thread has a stack of them ----------
inline constexpr int kNoDevice = -1;

SIMGPU_API int device_count();
SIMGPU_API int current_device();  // kNoDevice: no context is current
SIMGPU_API void set_current_device(int device);
SIMGPU_API void push_device(int device);
SIMGPU_API Code pop_device(int* device);
SIMGPU_API Code retain_primary(int device);
SIMGPU_API Code release_primary(int device);
SIMGPU_API bool primary_is_active(int device);

SIMGPU_API Code enter_runtime_context();  // initialises, and makes device 0 current where none is
Code context_refusal();  // kInvalidContext, or what the current context failed with
void fail_current_context(Code code, const std::string& why);

// Marks the running thread as executing a host function.
class InHostFunction {
 public:
  InHostFunction();
  ~InHostFunction();
  InHostFunction(const InHostFunction&) = delete;
  InHostFunction& operator=(const InHostFunction&) = delete;
};

}  // namespace simgpu
