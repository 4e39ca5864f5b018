#include "cuda_handles.h"

#include <utility>

namespace trae_mem {

CudaStream::CudaStream(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
  const CudaDriver& driver = context_->driver();
  int least = 0;
  int greatest = 0;
  context_->check(driver.cuCtxGetStreamPriorityRange(&least, &greatest), "create_stream",
                  "cuCtxGetStreamPriorityRange");
  context_->check(driver.cuStreamCreateWithPriority(&pointer_, cuda::kStreamNonBlocking, greatest),
                  "create_stream", "cuStreamCreateWithPriority");
}

CudaStream::~CudaStream() {
  const CudaContext::Guard guard(*context_, std::nothrow);
  if (!guard.entered()) return;
  CudaDriver::insist([this] { return context_->driver().cuStreamDestroy(pointer_); });
}

CudaEvent::CudaEvent(std::shared_ptr<const CudaContext> context, bool timed)
    : context_(std::move(context)) {
  const unsigned flags = timed ? cuda::kEventDefault : cuda::kEventDisableTiming;
  context_->check(context_->driver().cuEventCreate(&pointer_, flags), "create_event",
                  "cuEventCreate");
}

CudaEvent::~CudaEvent() {
  const CudaContext::Guard guard(*context_, std::nothrow);
  if (!guard.entered()) return;
  CudaDriver::insist([this] { return context_->driver().cuEventDestroy(pointer_); });
}

}  // namespace trae_mem
