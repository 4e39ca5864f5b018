// What is known of an operator from its schema and registrations, found once and kept beside its
// kernel: which arguments it writes, which result is an argument again, whether it draws random
// numbers, and whether the forms of its results can be known before it has run.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trae_mem::simgpu {

struct OperatorFacts;

// Takes the place of the CPU's kernel: replaces the arguments on the stack by the results. What
// draws random numbers takes them from `generator`.
using Substitute = void (*)(const OperatorFacts& facts, torch::jit::Stack& stack,
                            const at::Generator& generator);

struct OperatorFacts {
  explicit OperatorFacts(const c10::OperatorHandle& op);

  c10::OperatorHandle op;
  std::string name;  // "aten::add.Tensor"
  struct Argument {
    bool written = false;  // the operator writes to it
    bool is_out = false;   // an `out=` argument: written, and may be resized
    bool is_number =
        false;  // a Scalar; its type matters for the results' forms, its value does not
  };
  std::vector<Argument> arguments;
  std::vector<int> result_is_argument;   // for each result: the argument that it is, or -1
  int generator = -1;                    // index of the Generator argument, -1: none
  bool draws = false;                    // random numbers, from a generator that we can give
  bool draws_without_generator = false;  // random numbers, always from the default generator
  bool results_are_tensors = true;       // or lists of them
  bool forms_depend_on_values = false;   // nonzero, unique, ...
  bool forms_depend_on_numbers = false;  // arange, linspace: no tensor says how large the result is
  bool has_cpu_kernel = false;
  bool is_aten = false;
  bool takes_host_tensors = false;  // indexing: indices may be in host memory
  Substitute substitute = nullptr;

  // Whether this call must wait for its inputs' values before anything can be said of its results.
  [[nodiscard]] bool must_see_values(const torch::jit::Stack& stack) const;
  // Runs on CPU tensors; replaces the arguments on the stack by the results.
  void run_on_cpu(torch::jit::Stack& stack, const at::Generator& numbers) const;
  // The CPU's own kernel, whatever substitute there is.
  void run_kernel(torch::jit::Stack& stack) const;
};

}  // namespace trae_mem::simgpu
