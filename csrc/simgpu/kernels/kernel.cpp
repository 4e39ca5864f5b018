#include "simgpu/kernels/kernel.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "simgpu/kernels/queue.h"
#include "simgpu/kernels/random.h"

namespace trae_mem::simgpu {
namespace {

// Forms that training meets are few; a program that meets more must not fill the memory with them.
constexpr size_t kMostPlans = 4096;

at::Tensor empty_on(c10::Device device, const Form& form) {
  return at::empty_strided(form.sizes, form.strides, at::TensorOptions(form.dtype).device(device));
}

at::Tensor view_of(const at::Tensor& original, const PlannedTensor& plan) {
  return original.as_strided(plan.form.sizes, plan.form.strides,
                             original.storage_offset() + plan.offset);
}

void give_form(const at::Tensor& original, const Form& form) {
  original.resize_(form.sizes);
  original.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes, form.strides,
                                                        original.storage_offset());
}

// Writes a result of the CPU's kernel to the memory that was allocated for it.
void store(const at::Tensor& result, const at::Tensor& target) {
  TORCH_CHECK(result.sizes() == target.sizes() && result.scalar_type() == target.scalar_type(),
              "the result is ", result.scalar_type(), " of size ", result.sizes(), ", not ",
              target.scalar_type(), " of size ", target.sizes(),
              " as for zeros; its form depends on values");
  const bool plain = !result.is_conj() && !result.is_neg();
  if (plain && result.strides() == target.strides() && result.is_non_overlapping_and_dense()) {
    if (result.nbytes() > 0) {
      std::memcpy(target.mutable_data_ptr(), result.const_data_ptr(), result.nbytes());
    }
  } else {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(result);
  }
}

// What runs on the stream's thread.
struct Work {
  const OperatorFacts& facts;
  CallImage call;
  std::vector<std::vector<std::optional<size_t>>> targets;  // by result and its tensors
  bool grad_mode;
  int threads;

  void operator()() const {
    const at::AutoGradMode mode(grad_mode);
    // A sum's rounding depends on how many threads share it.
    if (at::get_num_threads() != threads) at::set_num_threads(threads);
    const std::vector<at::Tensor> aliases = call.aliases();
    torch::jit::Stack stack = call.stack_with(aliases);
    facts.run_on_cpu(stack, call.generator());
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].empty()) continue;
      bool is_list = false;
      const std::vector<at::Tensor> tensors = tensors_of(stack[i], is_list);
      TORCH_CHECK(tensors.size() == targets[i].size(), "it returned ", tensors.size(),
                  " tensors, not ", targets[i].size(), " as for zeros");
      for (size_t k = 0; k < tensors.size(); ++k) {
        if (targets[i][k].has_value()) store(tensors[k], aliases[*targets[i][k]]);
      }
    }
  }
};

c10::IValue as_result(std::vector<at::Tensor> tensors, bool is_list) {
  if (!is_list) return tensors.empty() ? c10::IValue() : c10::IValue(std::move(tensors.front()));
  return c10::List<at::Tensor>(tensors);
}

// The arguments as the caller sees them, at the top of the stack.
const c10::IValue& argument(const torch::jit::Stack& stack, const OperatorFacts& facts, int index) {
  return stack[stack.size() - facts.arguments.size() + static_cast<size_t>(index)];
}

void finish(torch::jit::Stack& stack, const OperatorFacts& facts,
            std::vector<c10::IValue> results) {
  torch::jit::drop(stack, facts.arguments.size());
  for (c10::IValue& result : results) stack.push_back(std::move(result));
}

void run_behind_the_stream(const OperatorFacts& facts, CallImage call, const Plan& plan,
                           torch::jit::Stack& stack) {
  for (const auto& [tensor, form] : plan.resized) {
    give_form(call.originals()[tensor], form);
    call.refresh(tensor);
  }
  std::vector<c10::IValue> results;
  std::vector<std::vector<std::optional<size_t>>> targets(plan.results.size());
  for (size_t i = 0; i < plan.results.size(); ++i) {
    const PlannedResult& result = plan.results[i];
    if (result.argument >= 0) {
      results.push_back(argument(stack, facts, result.argument));
      continue;
    }
    std::vector<at::Tensor> tensors;
    for (const PlannedTensor& tensor : result.tensors) {
      std::optional<size_t> target;
      if (tensor.kind == PlannedTensor::Kind::kNone) {
        tensors.emplace_back();
      } else if (tensor.kind == PlannedTensor::Kind::kView) {
        tensors.push_back(view_of(call.originals()[tensor.viewed], tensor));
      } else {
        tensors.push_back(empty_on(call.device(), tensor.form));
        target = call.add_result(tensors.back());
      }
      targets[i].push_back(target);
    }
    results.push_back(as_result(std::move(tensors), result.is_list));
  }
  if (facts.draws) {
    call.set_generator(facts, draw_generator(call.given_generator(facts), call.device()));
  }
  call.drop_originals();
  const c10::Device device = call.device();
  const std::vector<simgpu_range> ranges = call.ranges();
  Work work{facts, std::move(call), std::move(targets), at::GradMode::is_enabled(),
            at::get_num_threads()};
  queue_work(device, facts.name, std::move(work), ranges);
  finish(stack, facts, std::move(results));
}

// A result of a run on the caller's thread, moved to the device.
at::Tensor on_device(const OperatorFacts& facts, const at::Tensor& result, const CallImage& call,
                     const std::vector<at::Tensor>& inputs) {
  const PlannedTensor plan = planned(facts, result, inputs);
  if (plan.kind == PlannedTensor::Kind::kNone) return {};
  if (plan.kind == PlannedTensor::Kind::kView) {
    return view_of(call.originals()[plan.viewed], plan);
  }
  at::Tensor made = empty_on(call.device(), plan.form);
  store(result, host_alias(made));
  return made;
}

void run_with_default_generator(const OperatorFacts& facts, const CallImage& call,
                                torch::jit::Stack& stack) {
  const BorrowedDefaultGenerator borrowed(draw_generator(std::nullopt, call.device()));
  facts.run_on_cpu(stack, call.generator());
}

void run_at_once(const OperatorFacts& facts, CallImage call, torch::jit::Stack& stack) {
  if (facts.draws) {
    call.set_generator(facts, draw_generator(call.given_generator(facts), call.device()));
  }
  wait_for_queued_work(call.device(), facts.name, call.ranges());
  const std::vector<at::Tensor> inputs = call.aliases_with_resizable_outs(facts);
  torch::jit::Stack own = call.stack_with(inputs);
  if (facts.draws_without_generator) {
    run_with_default_generator(facts, call, own);
  } else {
    facts.run_on_cpu(own, call.generator());
  }
  for (const size_t out : call.outs(facts)) {
    const at::Tensor& original = call.originals()[out];
    const Form form = Form::of(inputs[out]);
    if (form.sizes != Form::of(original).sizes) give_form(original, form);
    store(inputs[out], host_alias(original));
  }
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < own.size(); ++i) {
    if (const int same = facts.result_is_argument[i]; same >= 0) {
      results.push_back(argument(stack, facts, same));
    } else if (own[i].isTensor() || own[i].isTensorList()) {
      bool is_list = false;
      std::vector<at::Tensor> tensors = tensors_of(own[i], is_list);
      for (at::Tensor& tensor : tensors) tensor = on_device(facts, tensor, call, inputs);
      results.push_back(as_result(std::move(tensors), is_list));
    } else {
      results.push_back(own[i]);
    }
  }
  finish(stack, facts, std::move(results));
}

}  // namespace

Kernel::PlanPointer Kernel::plan_for(const OperatorFacts& facts, const CallImage& call) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(call.key());
    if (found != plans_.end()) return found->second;
  }
  auto plan = std::make_shared<const std::optional<Plan>>(rehearse(facts, call));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (plans_.size() >= kMostPlans) plans_.clear();
  return plans_.emplace(call.key(), std::move(plan)).first->second;
}

void Kernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                        torch::jit::Stack* stack) {
  std::call_once(looked_up_, [&] { facts_ = std::make_unique<OperatorFacts>(op); });
  const OperatorFacts& facts = *facts_;
  TORCH_CHECK_NOT_IMPLEMENTED(
      facts.has_cpu_kernel, "simulated GPU: ", facts.name,
      " has no CPU kernel, and kernels run on the CPU here. Use an operator that has one, or run "
      "this on a real GPU.");
  CallImage call(facts, *stack);
  const c10::DeviceGuard guard(call.device());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // also for what allocates results
  if (facts.must_see_values(*stack)) {
    run_at_once(facts, std::move(call), *stack);
    return;
  }
  const PlanPointer plan = plan_for(facts, call);
  if (plan->has_value()) {
    run_behind_the_stream(facts, std::move(call), **plan, *stack);
  } else {
    run_at_once(facts, std::move(call), *stack);
  }
}

void FallbackKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                torch::jit::Stack* stack) {
  Kernel* kernel = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Kernel>& kept = kernels_[op.operator_name()];
    if (kept == nullptr) kept = std::make_unique<Kernel>();
    kernel = kept.get();
  }
  (*kernel)(op, keys, stack);
}

}  // namespace trae_mem::simgpu
