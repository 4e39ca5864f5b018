// Threads that read files side by side for one caller at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace trae_mem {

class ReaderPool {
 public:
  // The caller of `run` works too: `threads` - 1 are started.
  explicit ReaderPool(std::size_t threads);
  ~ReaderPool();  // no run may be in progress
  ReaderPool(const ReaderPool&) = delete;
  ReaderPool& operator=(const ReaderPool&) = delete;

  // Runs all jobs, returns when each has ended, and throws the first failure. Thread-safe.
  void run(std::vector<std::function<void()>> jobs);

 private:
  struct Round;  // the jobs of one call of run
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Round*> rounds_;  // those with jobs that nobody has begun
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace trae_mem
