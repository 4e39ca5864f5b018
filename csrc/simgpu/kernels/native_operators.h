// Which operators keep torch's own CUDA implementation on the simulated GPU: those that launch no
// kernel. They make views, allocate, or call the CUDA runtime, which the simulator implements.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace trae_mem::simgpu {

bool stays_native(const c10::OperatorHandle& op);

}  // namespace trae_mem::simgpu
