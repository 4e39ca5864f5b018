// Puts the CPU's kernels in the place of CUDA's: the library's one entry point, which
// `trae_mem.sim` calls once torch is loaded.

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "simgpu/kernels/copy.h"
#include "simgpu/kernels/kernel.h"
#include "simgpu/kernels/native_operators.h"
#include "simgpu/kernels/queue.h"

namespace trae_mem::simgpu {
namespace {

// Without a CUDA kernel of their own these split into operators that only cuDNN implements.
constexpr std::array kWholeOnTheCpu = {"aten::convolution", "aten::convolution_backward"};

constexpr int64_t kMathBackend = 0;  // at::SDPBackend::math

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                         bool) {
  return kMathBackend;
}

void answer_attention_choice(const c10::OperatorHandle& op, c10::DispatchKeySet,
                             torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(kMathBackend);
}

class Installer {
 public:
  void install() {
    static SilentWarnings silent;
    const c10::WarningUtils::WarningHandlerGuard no_warnings(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name :
         dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
      const auto op = dispatcher.findSchema(name);
      if (op.has_value() && !stays_native(*op)) override_with_cpu(name);
    }
    for (const char* name : kWholeOnTheCpu) override_with_cpu({name, ""});
    keep(dispatcher.registerImpl({"aten::copy_", ""}, c10::DispatchKey::CUDA,
                                 c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy_),
                                 std::nullopt, nullptr, "trae_mem simulated GPU"));
    keep(dispatcher.registerImpl(
        {"aten::_fused_sdp_choice", ""}, c10::DispatchKey::CUDA,
        c10::KernelFunction::makeFromBoxedFunction<&answer_attention_choice>(), std::nullopt,
        nullptr, "trae_mem simulated GPU"));
    keep(dispatcher.registerFallback(
        c10::DispatchKey::CUDA,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<FallbackKernel>()),
        "trae_mem simulated GPU"));
    // scaled_dot_product_attention asks this table, not the operator.
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
    // Batch norm and recurrent layers then do without cuDNN.
    at::globalContext().setUserEnabledCuDNN(false);
    // Torch was loaded before: what it destroys at the process's end, it destroys after this. The
    // simulator ends its streams, too, but later than torch if the driver was used before torch.
    std::atexit(stop_running_work);
  }

  [[nodiscard]] int count() const { return static_cast<int>(registrations_.size()); }

 private:
  class SilentWarnings final : public c10::WarningHandler {
   public:
    void process(const c10::Warning&) override {}
  };

  void override_with_cpu(const c10::OperatorName& name) {
    keep(c10::Dispatcher::singleton().registerImpl(
        name, c10::DispatchKey::CUDA,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>()), std::nullopt,
        nullptr, "trae_mem simulated GPU"));
  }

  void keep(c10::RegistrationHandleRAII registration) {
    registrations_.push_back(std::move(registration));
  }

  std::deque<c10::RegistrationHandleRAII> registrations_;
};

}  // namespace
}  // namespace trae_mem::simgpu

// Returns how many kernels were replaced; -1 and the reason in `message` if that failed.
extern "C" __attribute__((visibility("default"))) int simgpu_install_kernels(char* message,
                                                                             size_t size) {
  try {
    // Never destroyed: torch's dispatcher may be gone by then.
    static auto* installer = std::make_unique<trae_mem::simgpu::Installer>().release();
    if (installer->count() == 0) installer->install();
    return installer->count();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    message[text.copy(message, size - 1)] = '\0';
    return -1;
  }
}
