#include "simgpu/kernels/native_operators.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace trae_mem::simgpu {
namespace {

// By name without overload.
constexpr std::array<std::string_view, 16> kLaunchNothing = {
    "aten::empty",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::_has_same_storage_numel",
    "aten::_local_scalar_dense",  // a copy to the host behind the stream, as on a GPU
    "aten::_make_dep_token",
    "aten::_pin_memory",
    "aten::_use_cudnn_ctc_loss",
    "aten::_use_cudnn_ctc_loss.Tensor",
    "aten::_use_miopen_ctc_loss",
    "aten::_use_miopen_ctc_loss.Tensor",
    "aten::_cudnn_init_dropout_state",
};

bool is_view(const c10::FunctionSchema& schema) {
  const auto writes = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto aliases = [](const c10::Argument& result) { return result.alias_info() != nullptr; };
  return std::ranges::none_of(schema.arguments(), writes) &&
         std::ranges::any_of(schema.returns(), aliases);
}

}  // namespace

bool stays_native(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (std::ranges::find(kLaunchNothing, schema.name()) != kLaunchNothing.end()) return true;
  if (is_view(schema)) return true;
  if (schema.name().starts_with("aten::")) return false;
  // Collectives and the like: they have no kernels of their own that the CPU could run.
  const bool communicates =
      schema.name().starts_with("c10d::") || schema.name().starts_with("symm_mem::");
  return communicates || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace trae_mem::simgpu
