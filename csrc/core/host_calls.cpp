#include "host_calls.h"

#include <utility>
#include <vector>

namespace trae_mem {

HostCalls::HostCalls(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}

void HostCalls::launch(cuda::StreamPointer stream, std::function<void()> work,
                       const char* operation) {
  auto made = std::make_unique<Call>(Call{shared_from_this(), std::move(work)});
  Call* const call = made.get();
  {
    const std::lock_guard lock(mutex_);
    queued_.emplace(call, std::move(made));
  }
  // Without the lock: the driver may wait for room in its queue, and so for calls to be made.
  const cuda::Result result = context_->driver().cuLaunchHostFunc(stream, trampoline, call);
  if (result == cuda::kSuccess) return;
  const std::unique_ptr<Call> refused = take(call);
  context_->check(result, operation, "cuLaunchHostFunc");
}

std::shared_ptr<const Completion> HostCalls::run(cuda::StreamPointer stream,
                                                 std::function<void()> work) {
  auto completion = std::make_shared<Completion>();
  auto guarded = [completion, work = std::move(work)]() mutable {
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    work = nullptr;  // gone before anybody learns that it has run
    completion->finish(std::move(error));
  };
  launch(stream, std::move(guarded), "run");
  return completion;
}

void HostCalls::trampoline(void* data) {
  auto* const call = static_cast<Call*>(data);
  const std::shared_ptr<HostCalls> owner = call->owner;
  {
    const std::lock_guard lock(owner->mutex_);
    call->begun = true;
  }
  call->work();
  const std::unique_ptr<Call> made = owner->take(call);
}

std::unique_ptr<HostCalls::Call> HostCalls::take(Call* call) {
  const std::lock_guard lock(mutex_);
  const auto found = queued_.find(call);
  std::unique_ptr<Call> taken = std::move(found->second);
  queued_.erase(found);
  return taken;
}

void HostCalls::abandon() {
  std::vector<std::unique_ptr<Call>> left;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  for (auto call = queued_.begin(); call != queued_.end();) {
    if (call->second->begun) {
      ++call;
    } else {
      left.push_back(std::move(call->second));
      call = queued_.erase(call);
    }
  }
}

}  // namespace trae_mem
