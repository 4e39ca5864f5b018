#include "host_stream.h"

#include <utility>

namespace trae_mem {

HostStream::HostStream(std::function<void()> before_each)
    : before_each_(std::move(before_each)), thread_([this] { work(); }) {}

HostStream::~HostStream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HostStream::push(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void HostStream::record_into(std::shared_ptr<Completion> completion) {
  push([this, completion = std::move(completion)] {
    completion->finish(std::exchange(failure_, nullptr));
  });
}

void HostStream::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
}

void HostStream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    try {
      before_each_();
      task();
    } catch (...) {
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
    task = nullptr;  // what it captured must not be destroyed under the lock
    lock.lock();
    busy_ = false;
    if (tasks_.empty()) changed_.notify_all();
  }
}

}  // namespace trae_mem
