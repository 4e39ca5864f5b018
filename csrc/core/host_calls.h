// Host code that a GPU's stream runs in its order: std::function over cuLaunchHostFunc.
//
// The driver calls such code on a thread of its own, may run that of all streams one behind the
// other, and forbids it to call the driver. It never calls it once the context is lost; so the
// calls are kept here, and what is left of them goes with `abandon`. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "completion.h"
#include "cuda_context.h"

namespace trae_mem {

class HostCalls : public std::enable_shared_from_this<HostCalls> {
 public:
  explicit HostCalls(std::shared_ptr<const CudaContext> context);

  // Queues `work`, which must not throw, in the stream; it is destroyed as soon as it has run.
  // Under a Guard. Throws what the driver refuses.
  void launch(cuda::StreamPointer stream, std::function<void()> work, const char* operation);
  // The same for work that may throw: the result has its outcome.
  std::shared_ptr<const Completion> run(cuda::StreamPointer stream, std::function<void()> work);
  // The context is lost: no call that has not begun will be made.
  void abandon();

 private:
  struct Call {
    std::shared_ptr<HostCalls> owner;  // lives as long as calls are queued
    std::function<void()> work;
    bool begun = false;
  };
  static void trampoline(void* data);
  std::unique_ptr<Call> take(Call* call);

  const std::shared_ptr<const CudaContext> context_;
  std::mutex mutex_;
  std::unordered_map<Call*, std::unique_ptr<Call>> queued_;
};

}  // namespace trae_mem
