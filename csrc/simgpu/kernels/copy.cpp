#include "simgpu/kernels/copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>

#include <memory>

#include "simgpu/kernels/kernel.h"

namespace trae_mem::simgpu {
namespace {

bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.is_contiguous() && from.is_contiguous() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg();
}

void copy_by_kernel(const at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  // Never destroyed: streams may still run its work when the process ends.
  static Kernel& kernel = *std::make_unique<Kernel>().release();
  torch::jit::Stack stack{self, source, non_blocking};
  kernel(op, c10::DispatchKeySet(c10::DispatchKey::CUDA), &stack);
}

}  // namespace

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool within_device = self.is_cuda() && source.device() == self.device();
  if (within_device && !is_plain(self, source) && !self.is_same(source)) {
    copy_by_kernel(self, source, non_blocking);
    return self;
  }
  return at::native::copy_(self, source, non_blocking);
}

}  // namespace trae_mem::simgpu
