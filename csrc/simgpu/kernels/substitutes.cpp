#include "simgpu/kernels/substitutes.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/ScalarType.h>

#include <string_view>
#include <tuple>
#include <utility>

#include "simgpu/kernels/fused_cells.h"

namespace trae_mem::simgpu {
namespace {

using torch::jit::Stack;

// As the CPU's own, but from the given generator.
void native_dropout(const OperatorFacts&, Stack& stack, const at::Generator& generator) {
  const at::Tensor input = stack[0].toTensor();
  const double keep = 1 - stack[1].toDouble();
  const bool train = stack[2].isNone() || stack[2].toBool();
  const auto mask_options = input.options().dtype(c10::ScalarType::Bool);
  at::Tensor result;
  at::Tensor mask;
  if (train) {
    mask = at::empty_like(input, mask_options);
    mask.bernoulli_(keep, generator);
    result = input.mul(mask).mul_(keep == 0 ? 0.0 : 1 / keep);
  } else {
    mask = at::ones_like(input, mask_options);
    result = input.clone();
  }
  stack.clear();
  stack.emplace_back(std::move(result));
  stack.emplace_back(std::move(mask));
}

// Only CUDA reads half precision and computes in single, in one operator.
void softmax(const OperatorFacts& facts, Stack& stack, const at::Generator&) {
  if (stack[2].toBool()) {
    stack[0] = stack[0].toTensor().to(c10::ScalarType::Float);
    stack[2] = false;
  }
  facts.run_kernel(stack);
}

void softmax_backward(const OperatorFacts& facts, Stack& stack, const at::Generator&) {
  const auto input_dtype = static_cast<c10::ScalarType>(stack[3].toInt());
  stack[3] = static_cast<int64_t>(stack[0].toTensor().scalar_type());
  facts.run_kernel(stack);
  const at::Tensor gradient = stack[0].toTensor();
  if (gradient.scalar_type() != input_dtype) stack[0] = gradient.to(input_dtype);
}

struct Entry {
  std::string_view name;
  Substitute substitute;
};

constexpr Entry kSubstitutes[] = {
    {"aten::native_dropout", native_dropout},
    {"aten::_softmax", softmax},
    {"aten::_log_softmax", softmax},
    {"aten::_softmax_backward_data", softmax_backward},
    {"aten::_log_softmax_backward_data", softmax_backward},
    {"aten::_thnn_fused_lstm_cell", lstm_cell},
    {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"aten::_thnn_fused_gru_cell", gru_cell},
    {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
};

}  // namespace

Substitute find_substitute(const std::string& name) {
  for (const Entry& entry : kSubstitutes) {
    if (entry.name == name) return entry.substitute;
  }
  return nullptr;
}

}  // namespace trae_mem::simgpu
