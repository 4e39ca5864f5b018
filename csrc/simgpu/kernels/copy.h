// `copy_` on the simulated GPU.
//
// Torch's own implementation stays, with its calls of cudaMemcpyAsync: whether a copy blocks, and
// where pinned memory matters, is then as on a GPU. Only a copy within one device that has to
// convert or to rearrange is a kernel there; it is a kernel of the CPU here. (Copies between host
// and device that convert are split by torch into such a one and a plain one.)
#pragma once

#include <ATen/core/Tensor.h>

namespace trae_mem::simgpu {

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);

}  // namespace trae_mem::simgpu
