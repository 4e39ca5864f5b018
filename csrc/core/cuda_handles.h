// A stream and an event of the driver, destroyed with their owners.
//
// Destroying waits for nothing: the driver keeps what is still in use until it is not. In a forked
// child, and when the driver has ended before us, nothing is done.
#pragma once

#include <memory>

#include "cuda_context.h"

namespace trae_mem {

class CudaStream {
 public:
  // Of the highest priority, and never waiting for the default stream. Under a Guard; throws.
  explicit CudaStream(std::shared_ptr<const CudaContext> context);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  [[nodiscard]] cuda::StreamPointer pointer() const noexcept { return pointer_; }

 private:
  std::shared_ptr<const CudaContext> context_;
  cuda::StreamPointer pointer_ = nullptr;
};

class CudaEvent {
 public:
  // Under a Guard; throws. `timed`: cuEventElapsedTime may be asked of it.
  CudaEvent(std::shared_ptr<const CudaContext> context, bool timed);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  [[nodiscard]] cuda::EventPointer pointer() const noexcept { return pointer_; }

 private:
  std::shared_ptr<const CudaContext> context_;
  cuda::EventPointer pointer_ = nullptr;
};

}  // namespace trae_mem
