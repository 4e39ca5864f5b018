#include "simgpu/kernels/plan.h"

#include <c10/util/Exception.h>

#include "simgpu/kernels/random.h"

namespace trae_mem::simgpu {

std::vector<at::Tensor> tensors_of(const c10::IValue& result, bool& is_list) {
  is_list = result.isList();
  std::vector<at::Tensor> tensors;
  if (!is_list) {
    tensors.push_back(result.isTensor() ? result.toTensor() : at::Tensor());
    return tensors;
  }
  for (const c10::IValue& element : result.toListRef()) {
    tensors.push_back(element.isTensor() ? element.toTensor() : at::Tensor());
  }
  return tensors;
}

PlannedTensor planned(const OperatorFacts& facts, const at::Tensor& result,
                      const std::vector<at::Tensor>& inputs) {
  if (!result.defined()) return {};
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided && !result.is_quantized(),
                              "simulated GPU: ", facts.name, " gives a tensor of layout ",
                              result.layout(), result.is_quantized() ? ", quantized" : "",
                              "; only plain strided tensors can live on the simulated GPU");
  PlannedTensor plan{PlannedTensor::Kind::kFresh, Form::of(result)};
  if (result.nbytes() == 0) return plan;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].is_alias_of(result)) continue;
    if (inputs[i].scalar_type() != result.scalar_type()) continue;
    plan.kind = PlannedTensor::Kind::kView;
    plan.viewed = i;
    plan.offset = result.storage_offset() - inputs[i].storage_offset();
    break;
  }
  return plan;
}

std::optional<Plan> rehearse(const OperatorFacts& facts, const CallImage& call) {
  CallImage image = call;
  if (facts.draws) image.set_generator(facts, scratch_generator());
  const std::vector<at::Tensor> inputs = image.dummies(facts);
  torch::jit::Stack stack = image.stack_with(inputs);
  try {
    facts.run_on_cpu(stack, image.generator());
  } catch (const std::exception&) {
    return std::nullopt;
  }
  Plan plan;
  for (size_t i = 0; i < stack.size(); ++i) {
    PlannedResult result;
    result.argument = facts.result_is_argument[i];
    if (result.argument < 0) {
      for (const at::Tensor& tensor : tensors_of(stack[i], result.is_list)) {
        result.tensors.push_back(planned(facts, tensor, inputs));
      }
    }
    plan.results.push_back(std::move(result));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Form form = Form::of(inputs[i]);
    if (form.sizes != call.tensors()[i].form.sizes) plan.resized.emplace_back(i, form);
  }
  return plan;
}

}  // namespace trae_mem::simgpu
