// Host code that a GPU's stream runs in its order: std::function over cuLaunchHostFunc.
//
// The driver calls such code on a thread of its own, may run that of all streams one behind the
// other, and forbids it to call the driver. So a call that is queued keeps nothing alive that would
// call the driver when it goes, the context least of all. The driver never makes calls once the
// context is lost; they are kept in a book, and what is left of them goes with `abandon`.
//
// Thread-safe. Calls may be made, and end, behind this object.
#pragma once

#include <functional>
#include <memory>

#include "completion.h"
#include "cuda_context.h"

namespace trae_mem {

class HostCalls {
 public:
  explicit HostCalls(std::shared_ptr<const CudaContext> context);

  // Queues `work`, which must not throw, in the stream; it is destroyed as soon as it has run.
  // Under a Guard. Throws what the driver refuses.
  void launch(cuda::StreamPointer stream, std::function<void()> work, const char* operation);
  // The same for work that may throw: the result has its outcome.
  std::shared_ptr<const Completion> run(cuda::StreamPointer stream, std::function<void()> work);
  // The context is lost: no call that has not begun will be made. Waits for those that have.
  void abandon();

 private:
  struct Call;
  class Book;

  const std::shared_ptr<const CudaContext> context_;
  const std::shared_ptr<Book> book_;
};

}  // namespace trae_mem
