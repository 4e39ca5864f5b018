// A stream: a queue of work and, from the first work that needs one, a thread that does it in
// order. Nothing of a stream runs while one of the simulator's locks is held, but for work that has
// no effect at all (see `push`).
//
// Time. Without pace, work takes what it takes. With pace each stream has a clock of its own: work
// begins when the stream's clock, its submission and what it waits for allow, and advances the
// clock by what the model says. A thread sleeps only where time can be seen: before work that is
// visible to the host and before a copy takes the link. So thousands of small kernels cost no
// sleep, and a thread that wakes late makes nothing slower.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "task.h"

namespace simgpu {

class Device;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Device& device, std::uint64_t id, int priority, unsigned flags, const Library& owner);

  // Queues; runs at once what has no effect when nothing is before it and no delay is asked for.
  void push(Task task);
  // Blocks until everything queued so far is done.
  void synchronize();
  [[nodiscard]] bool idle() const;
  // The thread ends once the queue is empty; nothing may be pushed any more.
  void retire();

  // Calls `found` for the first work, queued or running, that touches the range.
  bool find_pending(std::uintptr_t address, std::size_t bytes,
                    const std::function<void(const Task&)>& found) const;

  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] int priority() const { return priority_; }
  [[nodiscard]] unsigned flags() const { return flags_; }
  [[nodiscard]] const Library& owner() const { return owner_; }

 private:
  [[nodiscard]] bool runs_at_once(const Task& task) const;
  void work();
  void delay(const Task& task);
  [[nodiscard]] Time execute(Task& task, Time clock);
  void finish(Task& task, Time end);
  [[nodiscard]] Time run(Task& task, Time clock);

  Device& device_;
  const std::uint64_t id_;
  const int priority_;
  const unsigned flags_;
  const Library& owner_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;  // the first one is the one that runs
  bool started_ = false;
  bool retired_ = false;
  Time clock_{};              // modelled end of the work so far
  std::uint64_t delays_ = 0;  // how many random delays were drawn; the thread's own
};

}  // namespace simgpu
