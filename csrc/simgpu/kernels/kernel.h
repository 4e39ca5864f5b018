// The kernel of one operator on the simulated GPU: queues the CPU's kernel over the same bytes.
//
// It is registered at the CUDA key and so covers every way to call an operator: any thread,
// autograd, foreach and fused optimizers, compiled graphs.
//
// [Note: behind the stream or at once]
// The ordinary way is that of a GPU. The results are allocated (by torch's allocator, on the
// device), the work is queued on the current stream, and the host goes on; the work runs when
// the stream comes to it. It sees addresses, not tensors: memory that was freed or overwritten too
// early gives wrong numbers, as on a GPU. An error then stops the whole device, as a device-side
// assertion does, and names the operator.
// Where the results' forms depend on values (`nonzero`), or an operator returns something else than
// tensors (`equal`), or is not PyTorch's own (it may be Python code), the host waits for the
// stream and runs the operator itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "simgpu/kernels/call_image.h"
#include "simgpu/kernels/operator_facts.h"
#include "simgpu/kernels/plan.h"

namespace trae_mem::simgpu {

class Kernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

 private:
  using PlanPointer = std::shared_ptr<const std::optional<Plan>>;

  PlanPointer plan_for(const OperatorFacts& facts, const CallImage& call);

  std::once_flag looked_up_;
  std::unique_ptr<OperatorFacts> facts_;
  std::mutex mutex_;
  std::unordered_map<std::string, PlanPointer> plans_;  // by CallImage::key
};

// The kernel for whatever has none of its own at the CUDA key: custom operators with CPU kernels.
class FallbackKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace trae_mem::simgpu
