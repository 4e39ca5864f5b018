// What a queued kernel remembers of its operator's call, and how the call is rebuilt for the CPU.
//
// A GPU keeps raw addresses, not tensors: memory that is freed too early is really gone by the time
// the kernel runs. A `CallImage` does the same. It holds address, sizes, strides and dtype of each
// device tensor, and rebuilds them as CPU tensors over the same bytes; it keeps none of them alive.
// Host tensors and numbers are taken by value, as a kernel's arguments are.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "simgpu/kernels/operator_facts.h"
#include "simgpu/simgpu.h"

namespace trae_mem::simgpu {

using Sizes = c10::SmallVector<int64_t, 5>;

// The form of a tensor: everything that decides how an operator lays out its results.
struct Form {
  Sizes sizes;
  Sizes strides;
  c10::ScalarType dtype = c10::ScalarType::Undefined;

  static Form of(const at::Tensor& tensor);
  [[nodiscard]] int64_t elements() const;
  [[nodiscard]] int64_t span() const;  // elements from the first to the last one, both included
  [[nodiscard]] size_t span_bytes() const;
  friend bool operator==(const Form&, const Form&) = default;
};

struct TensorImage {
  Form form;
  int64_t offset = 0;    // in elements, from the storage's beginning
  size_t storage = 0;    // index into the call's storages
  bool written = false;  // the schema says that the operator writes it
  bool conjugate = false;
  bool negative = false;
  bool wrapped_number = false;  // type promotion treats it as a Python number
  at::Tensor host;              // a host tensor, by value; then there is no storage

  [[nodiscard]] size_t begin() const;  // in bytes, from the storage's beginning
};

struct StorageImage {
  std::byte* base = nullptr;
  size_t bytes = 0;
  size_t first = 0;  // where the first tensor of the call that lies in it begins, in bytes
};

class CallImage {
 public:
  // Takes the call from the top of `stack`, which stays as it is.
  // Throws for tensors on different devices and for layouts other than strided.
  CallImage(const OperatorFacts& facts, const torch::jit::Stack& stack);

  [[nodiscard]] c10::Device device() const { return device_; }
  // Everything that decides the results' forms, as text; equal keys, equal forms.
  [[nodiscard]] const std::string& key() const { return key_; }
  [[nodiscard]] const std::vector<TensorImage>& tensors() const { return tensors_; }
  // The tensors of the call, in the order of tensors(). Only on the caller's side: see
  // drop_originals.
  [[nodiscard]] const std::vector<at::Tensor>& originals() const { return originals_; }
  void drop_originals() { originals_.clear(); }
  // Looks at an original again, after it was resized.
  void refresh(size_t tensor);

  // Adds a result that is not an argument; returns its index in tensors().
  size_t add_result(const at::Tensor& tensor);
  // What the operator draws its random numbers from.
  void set_generator(const OperatorFacts& facts, const at::Generator& generator);
  [[nodiscard]] const at::Generator& generator() const { return generator_; }
  [[nodiscard]] std::optional<at::Generator> given_generator(const OperatorFacts& facts) const;

  // The device memory that the kernel touches.
  [[nodiscard]] std::vector<simgpu_range> ranges() const;

  // CPU tensors over the same bytes, in the order of tensors().
  [[nodiscard]] std::vector<at::Tensor> aliases() const;
  // The same, but `out=` tensors are copies: the operator may resize them.
  [[nodiscard]] std::vector<at::Tensor> aliases_with_resizable_outs(
      const OperatorFacts& facts) const;
  // Indices of the `out=` tensors.
  [[nodiscard]] std::vector<size_t> outs(const OperatorFacts& facts) const;
  // CPU tensors of the same forms with memory of their own, full of zeros. Those that share memory
  // in the call share it here.
  [[nodiscard]] std::vector<at::Tensor> dummies(const OperatorFacts& facts) const;
  // The call's stack with these in the place of its tensors.
  [[nodiscard]] torch::jit::Stack stack_with(const std::vector<at::Tensor>& tensors) const;

 private:
  enum class Kind : uint8_t { kPlain, kTensor, kTensorList, kOptionalTensorList };

  struct Argument {
    Kind kind = Kind::kPlain;
    c10::IValue plain;
    c10::SmallVector<int32_t, 2> tensors;  // indices into tensors_, -1 for none
  };

  void take(const OperatorFacts& facts, size_t index, const c10::IValue& value);
  int32_t take_tensor(const OperatorFacts& facts, const at::Tensor& tensor, bool written);
  void take_device(const OperatorFacts& facts, const at::Tensor& tensor);
  TensorImage image_of(const at::Tensor& tensor, bool written);
  void append_plain(const c10::IValue& value, bool by_type);

  c10::Device device_{c10::DeviceType::CUDA, -1};
  at::Generator generator_;
  std::string key_;
  std::vector<Argument> arguments_;
  std::vector<TensorImage> tensors_;
  std::vector<StorageImage> storages_;
  std::vector<at::Tensor> originals_;
};

// A CPU tensor over the bytes of a device tensor.
at::Tensor host_alias(const at::Tensor& tensor);

}  // namespace trae_mem::simgpu
