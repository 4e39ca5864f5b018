// Operators that CUDA has in another form than the CPU: what runs on the CPU in their place.
#pragma once

#include <string>

#include "simgpu/kernels/operator_facts.h"

namespace trae_mem::simgpu {

// Null if the CPU's own kernel of that operator serves.
Substitute find_substitute(const std::string& name);

}  // namespace trae_mem::simgpu
