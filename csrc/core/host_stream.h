// A stream of a HostDevice: one thread that runs tasks in order; its events are completions.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "completion.h"

namespace trae_mem {

class HostStream {
 public:
  // `before_each` runs on the stream's thread before each task (random delays).
  explicit HostStream(std::function<void()> before_each);
  ~HostStream();  // runs what is queued, then joins
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  void push(std::function<void()> task);
  // The completion finishes behind everything pushed so far, with its first failure.
  void record_into(std::shared_ptr<Completion> completion);
  void synchronize();

 private:
  void work();

  std::function<void()> before_each_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a task was pushed, the queue ran empty, or stop
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;           // a task is running
  bool stop_ = false;           // leave once the queue is empty
  std::exception_ptr failure_;  // first failure since the last record; worker only
  std::thread thread_;          // last member: starts when all others exist
};

}  // namespace trae_mem
