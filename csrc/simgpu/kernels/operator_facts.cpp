#include "simgpu/kernels/operator_facts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

#include "simgpu/kernels/substitutes.h"

namespace trae_mem::simgpu {
namespace {

bool is_kind(const c10::TypePtr& type, c10::TypeKind kind) {
  if (type->kind() == kind) return true;
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return is_kind(optional->getElementType(), kind);
  }
  if (const auto list = type->cast<c10::ListType>()) return is_kind(list->getElementType(), kind);
  return false;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

int argument_with_alias(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return -1;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// A mask selects as many elements as it has ones.
bool has_mask(const c10::IValue& indices) {
  if (!indices.isList()) return false;
  for (const c10::IValue& index : indices.toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    const auto dtype = index.toTensor().scalar_type();
    if (dtype == c10::ScalarType::Bool || dtype == c10::ScalarType::Byte) return true;
  }
  return false;
}

}  // namespace

OperatorFacts::OperatorFacts(const c10::OperatorHandle& handle)
    : op(handle), name(toString(handle.operator_name())) {
  const c10::FunctionSchema& schema = op.schema();
  bool reads_a_tensor = false;
  for (const c10::Argument& argument : schema.arguments()) {
    Argument fact;
    fact.written = is_written(argument);
    fact.is_out = fact.written && argument.kwarg_only();
    fact.is_number = is_kind(argument.type(), c10::TypeKind::NumberType);
    if (is_kind(argument.type(), c10::TypeKind::GeneratorType)) {
      generator = static_cast<int>(arguments.size());
    }
    reads_a_tensor |= !fact.is_out && is_kind(argument.type(), c10::TypeKind::TensorType);
    arguments.push_back(fact);
  }
  for (const c10::Argument& result : schema.returns()) {
    result_is_argument.push_back(argument_with_alias(schema, result));
    results_are_tensors &= is_kind(result.type(), c10::TypeKind::TensorType);
  }
  substitute = find_substitute(name);
  const bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  draws = generator >= 0 || (seeded && substitute != nullptr);
  draws_without_generator = seeded && !draws;
  forms_depend_on_values =
      op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  forms_depend_on_numbers = !reads_a_tensor;
  has_cpu_kernel =
      substitute != nullptr || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  is_aten = schema.name().starts_with("aten::");
  takes_host_tensors = schema.name().starts_with("aten::index") ||
                       schema.name() == "aten::_index_put_impl_" ||
                       schema.name().starts_with("aten::copy_");
}

bool OperatorFacts::must_see_values(const torch::jit::Stack& stack) const {
  // Custom operators may do anything, for instance run Python code: they are called once, here.
  if (!is_aten || !results_are_tensors || draws_without_generator) return true;
  if (!forms_depend_on_values) return false;
  if (name == "aten::index.Tensor") return has_mask(stack.back());
  return true;
}

void OperatorFacts::run_on_cpu(torch::jit::Stack& stack, const at::Generator& numbers) const {
  // As below autograd and autocast, which this call has already gone through.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  if (substitute != nullptr) {
    substitute(*this, stack, numbers);
  } else {
    run_kernel(stack);
  }
}

void OperatorFacts::run_kernel(torch::jit::Stack& stack) const {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

}  // namespace trae_mem::simgpu
