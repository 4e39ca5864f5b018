// The names of kernels by the address of their host function, as compiled programs register them.
// PyTorch registers some ten thousand when it is loaded; the strings are its own.
#pragma once

#include "simgpu.h"

namespace simgpu {

SIMGPU_API void add_kernel(const void* host_function, const char* name);
// Mangled; "an unregistered kernel" if it is not known.
SIMGPU_API const char* kernel_name(const void* host_function);

}  // namespace simgpu
