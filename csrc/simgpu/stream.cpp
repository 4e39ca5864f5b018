#include "stream.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "configuration.h"
#include "device.h"
#include "memory.h"
#include "process.h"
#include "settings.h"

namespace simgpu {
namespace {

Time later(Time from, double seconds) {
  return from + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void sleep_until(Time at) {
  if (at > Clock::now()) std::this_thread::sleep_until(at);
}

std::uint64_t mixed(std::uint64_t value) {  // splitmix64
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

}  // namespace

Stream::Stream(Device& device, std::uint64_t id, int priority, unsigned flags, const Library& owner)
    : device_(device), id_(id), priority_(priority), flags_(flags), owner_(owner) {}

bool Stream::runs_at_once(const Task& task) const {
  if (!tasks_.empty()) return false;
  if (task.kind == Task::Kind::kWait) return task.point->processed();
  if (settings().delay_us != 0 && !task.hurried) return false;
  if (task.kind == Task::Kind::kRecord) return true;
  // Its ranges are still to be checked, which takes a lock that may be held around this one.
  return task.run == nullptr && task.ranges.empty() && task.link_bytes == 0;
}

void Stream::push(Task task) {
  task.submitted = Clock::now();
  const std::lock_guard lock(mutex_);
  if (runs_at_once(task)) {
    finish(task, execute(task, clock_));
    return;
  }
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    // Detached, since a stream may be destroyed with work in its queue, and processes end with
    // streams that wait for ever. The thread keeps the stream alive.
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  }
  changed_.notify_one();
}

void Stream::synchronize() {
  Task task;
  task.kind = Task::Kind::kRecord;
  task.point = std::make_shared<Completion>();
  task.hurried = true;
  const std::shared_ptr<Completion> point = task.point;
  push(std::move(task));
  point->wait();
}

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && clock_ <= Clock::now();
}

void Stream::retire() {
  {
    const std::lock_guard lock(mutex_);
    retired_ = true;
  }
  changed_.notify_one();
}

bool Stream::find_pending(std::uintptr_t address, std::size_t bytes,
                          const std::function<void(const Task&)>& found) const {
  const std::lock_guard lock(mutex_);
  for (const Task& task : tasks_) {
    for (const Range& range : task.ranges) {
      if (!range.overlaps(address, bytes)) continue;
      found(task);
      return true;
    }
  }
  return false;
}

void Stream::work() {
  set_current_device(device_.ordinal());
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return retired_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task& task = tasks_.front();  // a deque's elements stay where they are
    const Time clock = clock_;
    lock.unlock();
    const Time end = execute(task, clock);
    task.run = nullptr;  // what it captured is destroyed before the stream counts as idle
    lock.lock();
    finish(task, end);
    tasks_.pop_front();
  }
}

// Under the lock, so that whoever sees an event done sees the stream done, and the reverse.
void Stream::finish(Task& task, Time end) {
  clock_ = end;
  if (task.kind == Task::Kind::kRecord) task.point->finish(end);
}

void Stream::delay(const Task& task) {
  const std::uint64_t longest = settings().delay_us;
  if (longest == 0 || task.hurried || task.kind == Task::Kind::kWait) return;
  const std::uint64_t drawn = mixed(settings().seed ^ mixed(id_) ^ mixed(++delays_));
  std::this_thread::sleep_for(std::chrono::microseconds(drawn % (longest + 1)));
}

Time Stream::execute(Task& task, Time clock) {
  delay(task);
  const Time begin = std::max(clock, task.submitted);
  switch (task.kind) {
    case Task::Kind::kWait:
      return std::max(begin, task.point->wait_processed());
    case Task::Kind::kRecord:
      return configuration().pace ? begin : Clock::now();
    case Task::Kind::kWork:
      return run(task, begin);
  }
  return begin;
}

Time Stream::run(Task& task, Time begin) {
  if (device_.failure() != Code::kOk && !task.even_if_failed) return begin;
  Time end = begin;
  if (configuration().pace) {
    if (task.link_bytes > 0) {
      sleep_until(begin);  // the link is taken in the order of time, not of submission
      Link& link = task.engine == Engine::kToHost ? device_.to_host() : device_.to_device();
      end = link.take(begin, task.link_bytes, settings().link, priority_);
    } else if (task.seconds > 0) {
      end = later(begin, task.seconds);
      if (task.engine == Engine::kKernels) device_.add_kernel_seconds(task.seconds);
    }
    if (task.visible) sleep_until(end);
  }
  if (!task.ranges.empty() && !begin_use(task, device_)) return end;
  if (task.run) task.run();
  if (!task.ranges.empty()) end_use(task);
  // What the model gives no time to takes as long as it really does.
  return end > begin || !task.run ? end : Clock::now();
}

}  // namespace simgpu
