#include "simgpu/kernels/fused_cells.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <utility>
#include <vector>

namespace trae_mem::simgpu {
namespace {

using at::Tensor;
using torch::jit::Stack;

Tensor optional_tensor(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : Tensor();
}

Tensor biased(const Tensor& gates, const Tensor& bias) {
  return bias.defined() ? gates.add(bias) : gates;
}

void give(Stack& stack, std::initializer_list<Tensor> results) {
  stack.clear();
  for (const Tensor& result : results) stack.emplace_back(result);
}

// Slopes in terms of what the function gave.
Tensor sigmoid_slope(const Tensor& y) { return y.mul(y.neg().add(1)); }
Tensor tanh_slope(const Tensor& y) { return y.mul(y).neg().add(1); }

Tensor sum_rows(const Tensor& gates, bool wanted) { return wanted ? gates.sum(0) : Tensor(); }

}  // namespace

// (input_gates, hidden_gates, cx, input_bias?, hidden_bias?) -> (hy, cy, workspace); the workspace
// keeps the four gates after their activation.
void lstm_cell(const OperatorFacts&, Stack& stack, const at::Generator&) {
  const Tensor gates = biased(stack[0].toTensor(), optional_tensor(stack[3]))
                           .add(biased(stack[1].toTensor(), optional_tensor(stack[4])));
  const std::vector<Tensor> parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid();
  const Tensor forget = parts[1].sigmoid();
  const Tensor cell = parts[2].tanh();
  const Tensor out = parts[3].sigmoid();
  const Tensor cy = forget.mul(stack[2].toTensor()).add(in.mul(cell));
  give(stack, {out.mul(cy.tanh()), cy, at::cat({in, forget, cell, out}, 1)});
}

// (grad_hy?, grad_cy?, cx, cy, workspace, has_bias) -> (grad_gates, grad_cx, grad_bias)
void lstm_cell_backward(const OperatorFacts&, Stack& stack, const at::Generator&) {
  const Tensor cx = stack[2].toTensor();
  const Tensor cy = stack[3].toTensor();
  const std::vector<Tensor> gates = stack[4].toTensor().chunk(4, 1);
  const bool has_bias = stack[5].toBool();
  Tensor grad_hy = optional_tensor(stack[0]);
  Tensor grad_cy = optional_tensor(stack[1]);
  if (!grad_hy.defined()) grad_hy = at::zeros_like(cy);
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_cell_state = grad_hy.mul(gates[3]).mul(tanh_slope(tanh_cy));
  if (grad_cy.defined()) grad_cell_state = grad_cell_state.add(grad_cy);
  const Tensor grad_gates = at::cat({grad_cell_state.mul(gates[2]).mul(sigmoid_slope(gates[0])),
                                     grad_cell_state.mul(cx).mul(sigmoid_slope(gates[1])),
                                     grad_cell_state.mul(gates[0]).mul(tanh_slope(gates[2])),
                                     grad_hy.mul(tanh_cy).mul(sigmoid_slope(gates[3]))},
                                    1);
  give(stack, {grad_gates, grad_cell_state.mul(gates[1]), sum_rows(grad_gates, has_bias)});
}

// (input_gates, hidden_gates, hx, input_bias?, hidden_bias?) -> (hy, workspace); the workspace
// keeps the three gates after their activation, hx, and the hidden part of the third gate.
void gru_cell(const OperatorFacts&, Stack& stack, const at::Generator&) {
  const std::vector<Tensor> from_input =
      biased(stack[0].toTensor(), optional_tensor(stack[3])).chunk(3, 1);
  const std::vector<Tensor> from_hidden =
      biased(stack[1].toTensor(), optional_tensor(stack[4])).chunk(3, 1);
  const Tensor hx = stack[2].toTensor();
  const Tensor reset = from_input[0].add(from_hidden[0]).sigmoid();
  const Tensor update = from_input[1].add(from_hidden[1]).sigmoid();
  const Tensor fresh = from_input[2].add(reset.mul(from_hidden[2])).tanh();
  give(stack, {hx.sub(fresh).mul(update).add(fresh),
               at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)});
}

// (grad_hy, workspace, has_bias) ->
// (grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias)
void gru_cell_backward(const OperatorFacts&, Stack& stack, const at::Generator&) {
  const Tensor grad = stack[0].toTensor();
  const std::vector<Tensor> kept = stack[1].toTensor().chunk(5, 1);
  const bool has_bias = stack[2].toBool();
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3];
  const Tensor grad_fresh = grad.mul(update.neg().add(1)).mul(tanh_slope(fresh));
  const Tensor grad_update = grad.mul(hx.sub(fresh)).mul(sigmoid_slope(update));
  const Tensor grad_reset = grad_fresh.mul(kept[4]).mul(sigmoid_slope(reset));
  const Tensor of_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const Tensor of_hidden = at::cat({grad_reset, grad_update, grad_fresh.mul(reset)}, 1);
  give(stack, {of_input, of_hidden, grad.mul(update), sum_rows(of_input, has_bias),
               sum_rows(of_hidden, has_bias)});
}

// (grad_out, input, normalized_shape, rstd, weight?, output_mask) -> (grad_input, grad_weight), for
// out = input * rstd * weight with rstd = rsqrt(mean(input ** 2) + eps); in single precision.
void rms_norm_backward(const OperatorFacts&, Stack& stack, const at::Generator&) {
  const Tensor input = stack[1].toTensor();
  const auto normalized = static_cast<int64_t>(stack[2].toIntVector().size());
  const Tensor weight = optional_tensor(stack[4]);
  const auto computed = input.scalar_type() == c10::ScalarType::Double ? c10::ScalarType::Double
                                                                       : c10::ScalarType::Float;
  const Tensor x = input.to(computed);
  const Tensor rstd = stack[3].toTensor().to(computed);
  const Tensor grad = stack[0].toTensor().to(computed);
  std::vector<int64_t> inner;  // the dimensions that are normalised
  std::vector<int64_t> outer;
  int64_t count = 1;
  for (int64_t i = 0; i < x.dim(); ++i) {
    const bool is_inner = i >= x.dim() - normalized;
    (is_inner ? inner : outer).push_back(i);
    if (is_inner) count *= x.size(i);
  }
  const Tensor weighted = weight.defined() ? grad.mul(weight.to(computed)) : grad;
  const Tensor grad_rstd = weighted.mul(x).sum(inner, /*keepdim=*/true);
  const Tensor grad_mean = grad_rstd.mul(-0.5).mul(rstd.pow(3)).div(static_cast<double>(count));
  const Tensor grad_input = weighted.mul(rstd).add(grad_mean.mul(x.mul(2)));
  Tensor grad_weight;
  if (weight.defined()) {
    grad_weight = grad.mul(x.mul(rstd));
    if (!outer.empty()) grad_weight = grad_weight.sum(outer);
    grad_weight = grad_weight.to(weight.scalar_type());
  }
  give(stack, {grad_input.to(input.scalar_type()), grad_weight});
}

}  // namespace trae_mem::simgpu
