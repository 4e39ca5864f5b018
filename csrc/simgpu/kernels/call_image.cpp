#include "simgpu/kernels/call_image.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace trae_mem::simgpu {
namespace {

at::Tensor over(const c10::Storage& storage, const TensorImage& image) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::fromScalarType(image.form.dtype));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(image.form.sizes, image.form.strides, image.offset);
  if (image.conjugate) impl->_set_conj(true);
  if (image.negative) impl->_set_neg(true);
  if (image.wrapped_number) impl->set_wrapped_number(true);
  return tensor;
}

c10::Storage borrowed(void* base, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::DataPtr(base, c10::Device(c10::DeviceType::CPU)), nullptr, false);
}

// Zeroed pages cost nothing until they are written.
c10::Storage zeros(size_t bytes) {
  void* memory = std::calloc(std::max<size_t>(bytes, 1), 1);
  TORCH_CHECK(memory != nullptr, "simulated GPU: no host memory for ", bytes, " bytes");
  c10::DataPtr pointer(memory, memory, &std::free, c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), nullptr, false);
}

constexpr size_t kAlignment = 16;  // a multiple of the size of each dtype's elements

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_form(std::string& key, const TensorImage& image) {
  const Form& form = image.form;
  append(key, form.dtype);
  append(key, static_cast<uint8_t>(form.sizes.size()));
  for (const int64_t size : form.sizes) append(key, size);
  for (const int64_t stride : form.strides) append(key, stride);
  const auto flag = [](bool set, int bit) { return set ? 1 << bit : 0; };
  append(key, static_cast<uint8_t>(flag(image.conjugate, 0) | flag(image.negative, 1) |
                                   flag(image.wrapped_number, 2) | flag(image.host.defined(), 3)));
}

}  // namespace

Form Form::of(const at::Tensor& tensor) {
  return Form{Sizes(tensor.sizes().begin(), tensor.sizes().end()),
              Sizes(tensor.strides().begin(), tensor.strides().end()), tensor.scalar_type()};
}

int64_t Form::elements() const {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

int64_t Form::span() const {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return last + 1;
}

size_t Form::span_bytes() const { return static_cast<size_t>(span()) * c10::elementSize(dtype); }

size_t TensorImage::begin() const {
  return static_cast<size_t>(offset) * c10::elementSize(form.dtype);
}

CallImage::CallImage(const OperatorFacts& facts, const torch::jit::Stack& stack) {
  const size_t count = facts.arguments.size();
  arguments_.resize(count);
  for (size_t i = 0; i < count; ++i) take(facts, i, stack[stack.size() - count + i]);
  if (device_.index() < 0) {
    device_ = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  }
}

void CallImage::take(const OperatorFacts& facts, size_t index, const c10::IValue& value) {
  const OperatorFacts::Argument& fact = facts.arguments[index];
  Argument& argument = arguments_[index];
  if (value.isTensor()) {
    argument.kind = Kind::kTensor;
    argument.tensors.push_back(take_tensor(facts, value.toTensor(), fact.written));
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    argument.kind = value.isTensorList() ? Kind::kTensorList : Kind::kOptionalTensorList;
    const auto elements = value.toListRef();
    append(key_, static_cast<uint32_t>(elements.size()));
    for (const c10::IValue& element : elements) {
      const at::Tensor tensor = element.isTensor() ? element.toTensor() : at::Tensor();
      argument.tensors.push_back(take_tensor(facts, tensor, fact.written));
    }
  } else if (value.isDevice() && value.toDevice().is_cuda()) {
    if (value.toDevice().has_index()) device_ = value.toDevice();
    argument.plain = c10::Device(c10::DeviceType::CPU);
  } else {
    argument.plain = value;
    append_plain(value, fact.is_number && !facts.forms_depend_on_numbers);
  }
}

void CallImage::append_plain(const c10::IValue& value, bool by_type) {
  key_.push_back(value.isInt() ? 'i' : value.isDouble() ? 'd' : value.isBool() ? 'b' : '?');
  // A learning rate that changes with each step must not make each step a new form.
  if (value.isDouble()) {
    if (!by_type) append(key_, value.toDouble());
  } else if (value.isInt()) {
    if (!by_type) append(key_, value.toInt());
  } else if (value.isBool()) {
    append(key_, value.toBool());
  } else if (value.isString()) {
    key_ += value.toStringRef();
    key_.push_back('\0');
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    append(key_, static_cast<uint32_t>(elements.size()));
    for (const c10::IValue& element : elements) append_plain(element, by_type);
  } else if (value.isNone()) {
    key_.push_back('n');
  }
}

int32_t CallImage::take_tensor(const OperatorFacts& facts, const at::Tensor& tensor, bool written) {
  if (!tensor.defined()) {
    key_.push_back('u');
    return -1;
  }
  for (size_t i = 0; i < originals_.size(); ++i) {
    if (originals_[i].is_same(tensor)) {
      key_.push_back('s');
      append(key_, static_cast<uint32_t>(i));
      tensors_[i].written |= written;
      return static_cast<int32_t>(i);
    }
  }
  take_device(facts, tensor);
  tensors_.push_back(image_of(tensor, written));
  originals_.push_back(tensor);
  const TensorImage& image = tensors_.back();
  key_.push_back('t');
  append_form(key_, image);
  if (!image.host.defined()) {
    append(key_, static_cast<uint32_t>(image.storage));
    append(key_, image.begin() - storages_[image.storage].first);
  }
  return static_cast<int32_t>(tensors_.size() - 1);
}

void CallImage::take_device(const OperatorFacts& facts, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "simulated GPU: ", facts.name,
                              " was called with a tensor of layout ", tensor.layout(),
                              "; only strided tensors can be computed with");
  if (tensor.is_cuda()) {
    TORCH_CHECK(device_.index() < 0 || device_ == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device_, " and ", tensor.device(), "! (in ", facts.name, ")");
    device_ = tensor.device();
    return;
  }
  // Operators take numbers from the host; indices too.
  const bool may_be_on_host = tensor.dim() == 0 || facts.takes_host_tensors;
  TORCH_CHECK(tensor.is_cpu() && may_be_on_host,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              "cuda and ", tensor.device(), "! (in ", facts.name, ")");
}

TensorImage CallImage::image_of(const at::Tensor& tensor, bool written) {
  TensorImage image;
  image.form = Form::of(tensor);
  image.written = written;
  image.conjugate = tensor.is_conj();
  image.negative = tensor.is_neg();
  image.wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (tensor.is_cpu()) {
    image.host = image.wrapped_number ? tensor : tensor.clone();
    return image;
  }
  image.offset = tensor.storage_offset();
  const c10::Storage& storage = tensor.storage();
  auto* base = static_cast<std::byte*>(storage.mutable_data());
  for (image.storage = 0; image.storage < storages_.size(); ++image.storage) {
    if (storages_[image.storage].base == base) {
      storages_[image.storage].bytes = std::max(storages_[image.storage].bytes, storage.nbytes());
      return image;
    }
  }
  storages_.push_back({base, storage.nbytes(), image.begin()});
  return image;
}

void CallImage::refresh(size_t tensor) {
  tensors_[tensor] = image_of(originals_[tensor], tensors_[tensor].written);
}

size_t CallImage::add_result(const at::Tensor& tensor) {
  tensors_.push_back(image_of(tensor, true));
  return tensors_.size() - 1;
}

void CallImage::set_generator(const OperatorFacts& facts, const at::Generator& generator) {
  generator_ = generator;
  if (facts.generator >= 0) arguments_[static_cast<size_t>(facts.generator)].plain = generator;
}

std::optional<at::Generator> CallImage::given_generator(const OperatorFacts& facts) const {
  if (facts.generator < 0) return std::nullopt;
  const c10::IValue& given = arguments_[static_cast<size_t>(facts.generator)].plain;
  return given.isGenerator() ? std::optional(given.toGenerator()) : std::nullopt;
}

std::vector<simgpu_range> CallImage::ranges() const {
  std::vector<simgpu_range> found;
  for (const TensorImage& image : tensors_) {
    const size_t bytes = image.host.defined() ? 0 : image.form.span_bytes();
    if (bytes == 0) continue;
    found.push_back({storages_[image.storage].base + image.begin(), bytes, image.written ? 1 : 0});
  }
  return found;
}

std::vector<at::Tensor> CallImage::aliases() const {
  std::vector<c10::Storage> storages;
  storages.reserve(storages_.size());
  for (const StorageImage& image : storages_) storages.push_back(borrowed(image.base, image.bytes));
  std::vector<at::Tensor> made;
  made.reserve(tensors_.size());
  for (const TensorImage& image : tensors_) {
    made.push_back(image.host.defined() ? image.host : over(storages[image.storage], image));
  }
  return made;
}

std::vector<at::Tensor> CallImage::dummies(const OperatorFacts& facts) const {
  std::vector<std::pair<size_t, size_t>> extents(storages_.size(), {SIZE_MAX, 0});
  for (const TensorImage& image : tensors_) {
    if (image.host.defined()) continue;
    auto& [low, high] = extents[image.storage];
    low = std::min(low, image.begin() / kAlignment * kAlignment);
    high = std::max(high, image.begin() + image.form.span_bytes());
  }
  std::vector<c10::Storage> storages;
  for (const auto& [low, high] : extents) storages.push_back(zeros(high > low ? high - low : 0));
  std::vector<at::Tensor> made;
  for (const TensorImage& image : tensors_) {
    if (image.host.defined()) {
      made.push_back(image.host.clone());
      if (image.wrapped_number) made.back().unsafeGetTensorImpl()->set_wrapped_number(true);
      continue;
    }
    TensorImage dummy = image;
    dummy.offset -=
        static_cast<int64_t>(extents[image.storage].first / c10::elementSize(image.form.dtype));
    made.push_back(over(storages[image.storage], dummy));
  }
  // The operator may resize these, which borrowed memory does not allow.
  for (const size_t out : outs(facts)) {
    const Form& form = tensors_[out].form;
    made[out] = at::empty_strided(form.sizes, form.strides, at::TensorOptions(form.dtype));
    if (form.span() > 0) std::memset(made[out].mutable_data_ptr(), 0, form.span_bytes());
  }
  return made;
}

std::vector<size_t> CallImage::outs(const OperatorFacts& facts) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!facts.arguments[i].is_out) continue;
    for (const int32_t tensor : arguments_[i].tensors) {
      if (tensor >= 0) found.push_back(static_cast<size_t>(tensor));
    }
  }
  return found;
}

std::vector<at::Tensor> CallImage::aliases_with_resizable_outs(const OperatorFacts& facts) const {
  std::vector<at::Tensor> made = aliases();
  for (const size_t out : outs(facts)) {
    const Form& form = tensors_[out].form;
    at::Tensor copy = at::empty_strided(form.sizes, form.strides, at::TensorOptions(form.dtype));
    made[out] = copy.copy_(made[out]);
  }
  return made;
}

torch::jit::Stack CallImage::stack_with(const std::vector<at::Tensor>& tensors) const {
  const auto tensor = [&](int32_t index) {
    return index < 0 ? at::Tensor() : tensors[static_cast<size_t>(index)];
  };
  torch::jit::Stack stack;
  stack.reserve(arguments_.size());
  for (const Argument& argument : arguments_) {
    if (argument.kind == Kind::kPlain) {
      stack.push_back(argument.plain);
    } else if (argument.kind == Kind::kTensor) {
      stack.emplace_back(tensor(argument.tensors[0]));
    } else if (argument.kind == Kind::kTensorList) {
      c10::List<at::Tensor> list;
      for (const int32_t index : argument.tensors) list.push_back(tensor(index));
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const int32_t index : argument.tensors) {
        list.push_back(index < 0 ? std::nullopt : std::optional<at::Tensor>(tensor(index)));
      }
      stack.emplace_back(std::move(list));
    }
  }
  return stack;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  TensorImage image;
  image.form = Form::of(tensor);
  image.offset = tensor.storage_offset();
  image.conjugate = tensor.is_conj();
  image.negative = tensor.is_neg();
  const c10::Storage& storage = tensor.storage();
  return over(borrowed(storage.mutable_data(), storage.nbytes()), image);
}

}  // namespace trae_mem::simgpu
