#include "host_calls.h"

#include <condition_variable>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trae_mem {

struct HostCalls::Call {
  std::shared_ptr<Book> book;  // lives as long as calls are queued
  std::function<void()> work;
  bool begun = false;
};

// The calls that are queued or being made.
class HostCalls::Book {
 public:
  Call* add(std::unique_ptr<Call> call) {
    const std::lock_guard lock(mutex_);
    Call* const added = call.get();
    calls_.emplace(added, std::move(call));
    return added;
  }
  void begin(Call* call) {
    const std::lock_guard lock(mutex_);
    call->begun = true;
  }
  std::unique_ptr<Call> take(Call* call) {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(call);
    std::unique_ptr<Call> taken = std::move(found->second);
    calls_.erase(found);
    changed_.notify_all();
    return taken;
  }
  std::vector<std::unique_ptr<Call>> take_those_not_begun() {
    std::vector<std::unique_ptr<Call>> taken;
    const std::lock_guard lock(mutex_);
    for (auto call = calls_.begin(); call != calls_.end();) {
      if (call->second->begun) {
        ++call;
      } else {
        taken.push_back(std::move(call->second));
        call = calls_.erase(call);
      }
    }
    return taken;
  }

  void wait_for_those_begun() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return calls_.empty(); });
  }

  // What the driver calls.
  static void make(void* data) {
    auto* const call = static_cast<Call*>(data);
    const std::shared_ptr<Book> book = call->book;
    book->begin(call);
    call->work();
    const std::unique_ptr<Call> made = book->take(call);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;  // a call was taken
  std::unordered_map<Call*, std::unique_ptr<Call>> calls_;
};

HostCalls::HostCalls(std::shared_ptr<const CudaContext> context)
    : context_(std::move(context)), book_(std::make_shared<Book>()) {}

void HostCalls::launch(cuda::StreamPointer stream, std::function<void()> work,
                       const char* operation) {
  Call* const call = book_->add(std::make_unique<Call>(Call{book_, std::move(work)}));
  // Without the lock: the driver may wait for room in its queue, and so for calls to be made.
  const cuda::Result result = context_->driver().cuLaunchHostFunc(stream, Book::make, call);
  if (result == cuda::kSuccess) return;
  const std::unique_ptr<Call> refused = book_->take(call);
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

void HostCalls::abandon() {
  // Destroyed without the lock.
  const std::vector<std::unique_ptr<Call>> left = book_->take_those_not_begun();
  book_->wait_for_those_begun();
}

}  // namespace trae_mem
