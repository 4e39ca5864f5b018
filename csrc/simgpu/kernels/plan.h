// What a call will return, known before it has run.
//
// A kernel is queued and the host goes on, so the results' memory must be allocated before they
// exist. Their forms are found out by a *rehearsal*: the operator runs at once on zeros of the same
// forms. That gives exactly the strides that the CPU's kernel gives, needs no waiting for the
// device, and is done once for each combination of argument forms.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "simgpu/kernels/call_image.h"
#include "simgpu/kernels/operator_facts.h"

namespace trae_mem::simgpu {

struct PlannedTensor {
  enum class Kind : uint8_t { kNone, kFresh, kView };
  Kind kind = Kind::kNone;
  Form form;
  size_t viewed = 0;   // kView: of this tensor of the call
  int64_t offset = 0;  // kView: from that tensor's first element, in elements
};

struct PlannedResult {
  int argument = -1;  // it is this argument again; else it consists of:
  bool is_list = false;
  std::vector<PlannedTensor> tensors;
};

struct Plan {
  std::vector<PlannedResult> results;
  std::vector<std::pair<size_t, Form>> resized;  // `out=` tensors of the call and their new forms
};

// Runs the operator on zeros. Nothing if it does not take zeros: then only a run on the real values
// can tell, or raise the error that is due.
std::optional<Plan> rehearse(const OperatorFacts& facts, const CallImage& call);

// What a result consists of: its tensors, undefined ones included. `is_list` says which kind.
std::vector<at::Tensor> tensors_of(const c10::IValue& result, bool& is_list);

// A result of a run on CPU tensors: is it a view of one of those? Throws for sparse and quantized
// ones.
PlannedTensor planned(const OperatorFacts& facts, const at::Tensor& result,
                      const std::vector<at::Tensor>& inputs);

}  // namespace trae_mem::simgpu
