#include "reader_pool.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace trae_mem {

struct ReaderPool::Round {
  std::vector<std::function<void()>> jobs;
  std::size_t begun = 0;  // jobs that a thread took
  std::size_t ended = 0;
  std::exception_ptr failure;  // the first one
  std::condition_variable done;

  // Takes the next job and runs it; `lock` is held on entry and on return.
  void run_one(std::unique_lock<std::mutex>& lock, std::deque<Round*>& rounds) {
    const std::function<void()>& job = jobs[begun++];
    if (begun == jobs.size()) std::erase(rounds, this);
    lock.unlock();
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (failure == nullptr) failure = std::move(error);
    if (++ended == jobs.size()) done.notify_all();
  }
};

ReaderPool::ReaderPool(std::size_t threads) {
  for (std::size_t i = 1; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

ReaderPool::~ReaderPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReaderPool::run(std::vector<std::function<void()>> jobs) {
  if (jobs.empty()) return;
  Round round;
  round.jobs = std::move(jobs);
  std::unique_lock lock(mutex_);
  rounds_.push_back(&round);
  changed_.notify_all();
  while (round.begun < round.jobs.size()) round.run_one(lock, rounds_);
  round.done.wait(lock, [&round] { return round.ended == round.jobs.size(); });
  if (round.failure != nullptr) std::rethrow_exception(round.failure);
}

void ReaderPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !rounds_.empty(); });
    if (rounds_.empty()) return;
    rounds_.front()->run_one(lock, rounds_);
  }
}

}  // namespace trae_mem
