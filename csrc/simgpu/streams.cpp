#include "streams.h"

#include <algorithm>
#include <utility>

#include "configuration.h"
#include "device.h"
#include "memory.h"
#include "process.h"
#include "reports.h"

namespace simgpu {

Code create_stream(Handle* stream, int priority, unsigned flags) {
  const int clamped = std::clamp(priority, kHighestPriority, kLowestPriority);
  *stream = add_stream(device(current_device()), clamped, flags);
  return Code::kOk;
}

Code destroy_stream(Handle stream) {
  const std::shared_ptr<Stream> found = remove_stream(stream);
  if (found == nullptr) return Code::kInvalidHandle;
  found->retire();
  return Code::kOk;
}

Code synchronize_stream(Handle stream) {
  Call::note_blocking();
  const std::shared_ptr<Stream> found = find_stream(stream);
  if (found == nullptr) return Code::kInvalidHandle;
  found->synchronize();
  return found->device().failure();
}

Code query_stream(Handle stream) {
  const std::shared_ptr<Stream> found = find_stream(stream);
  if (found == nullptr) return Code::kInvalidHandle;
  if (found->device().failure() != Code::kOk) return found->device().failure();
  return found->idle() ? Code::kOk : Code::kNotReady;
}

Code wait_event(Handle stream, Handle event) {
  const std::shared_ptr<Stream> waiting = find_stream(stream);
  const std::shared_ptr<Event> found = find_event(event);
  if (waiting == nullptr || found == nullptr) return Code::kInvalidHandle;
  Task task;
  task.kind = Task::Kind::kWait;
  task.point = found->last();
  if (task.point == nullptr) {
    // PyTorch does so on purpose; for trae_mem it is a wait that protects nothing.
    if (current_library().trae_mem) {
      report(kind::kUnrecordedWait,
             "a stream is told to wait for an event that was never "
             "recorded: it waits for nothing. Record the event first.");
    }
    return Code::kOk;
  }
  waiting->push(std::move(task));
  return Code::kOk;
}

Code stream_facts(StreamFacts* facts, Handle stream) {
  const std::shared_ptr<Stream> found = find_stream(stream);
  if (found == nullptr) return Code::kInvalidHandle;
  *facts = {found->device().ordinal(), found->priority(), found->flags(), found->id()};
  return Code::kOk;
}

Code create_event(Handle* event, bool timed) {
  *event = add_event(device(current_device()), timed);
  return Code::kOk;
}

Code destroy_event(Handle event) {
  return remove_event(event) == nullptr ? Code::kInvalidHandle : Code::kOk;
}

Code record_event(Handle event, Handle stream) {
  const std::shared_ptr<Stream> recorded = find_stream(stream);
  const std::shared_ptr<Event> found = find_event(event);
  if (recorded == nullptr || found == nullptr) return Code::kInvalidHandle;
  if (&recorded->device() != &found->device) return Code::kInvalidHandle;
  Task task;
  task.kind = Task::Kind::kRecord;
  task.point = std::make_shared<Completion>();
  found->set_last(task.point);
  recorded->push(std::move(task));
  return Code::kOk;
}

Code query_event(Handle event) {
  const std::shared_ptr<Event> found = find_event(event);
  if (found == nullptr) return Code::kInvalidHandle;
  if (found->device.failure() != Code::kOk) return found->device.failure();
  const std::shared_ptr<Completion> point = found->last();
  return point == nullptr || point->reached() ? Code::kOk : Code::kNotReady;
}

Code synchronize_event(Handle event) {
  Call::note_blocking();
  const std::shared_ptr<Event> found = find_event(event);
  if (found == nullptr) return Code::kInvalidHandle;
  if (const std::shared_ptr<Completion> point = found->last()) point->wait();
  return found->device.failure();
}

Code elapsed_ms(float* milliseconds, Handle from, Handle to) {
  const std::shared_ptr<Event> first = find_event(from);
  const std::shared_ptr<Event> second = find_event(to);
  if (first == nullptr || second == nullptr) return Code::kInvalidHandle;
  if (!first->timed || !second->timed) return Code::kInvalidHandle;
  const std::shared_ptr<Completion> begin = first->last();
  const std::shared_ptr<Completion> end = second->last();
  if (begin == nullptr || end == nullptr) return Code::kInvalidHandle;
  if (!begin->reached() || !end->reached()) return Code::kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time() - begin->time()).count();
  return Code::kOk;
}

void synchronize_device(Device& device) {
  Call::note_blocking();
  for (const std::shared_ptr<Stream>& stream : all_streams()) {
    if (&stream->device() == &device) stream->synchronize();
  }
}

Code synchronize_current_device() {
  Device& current = device(current_device());
  synchronize_device(current);
  return current.failure();
}

}  // namespace simgpu
