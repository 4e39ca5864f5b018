// Streams and events by handle. Handles are numbers that are never used twice, so that a use after
// destruction and a second destruction are told from a handle that never was.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "calls.h"
#include "completion.h"
#include "stream.h"

namespace simgpu {

class Event {
 public:
  Event(Device& its_device, bool is_timed, const Library& its_owner)
      : device(its_device), timed(is_timed), owner(its_owner) {}

  // The point of the last record, or null.
  [[nodiscard]] std::shared_ptr<Completion> last() const;
  void set_last(std::shared_ptr<Completion> point);

  Device& device;
  const bool timed;
  const Library& owner;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Completion> last_;
};

using Handle = std::uintptr_t;

Handle add_stream(Device& device, int priority, unsigned flags);
Handle add_event(Device& device, bool timed);

// Null, and a report, for a handle that is not one. 0, 1 and 2 (the legacy and the per-thread
// default stream) are the current device's default stream.
std::shared_ptr<Stream> find_stream(Handle handle);
std::shared_ptr<Event> find_event(Handle handle);
// Takes it out of the books; null, and a report, as above.
std::shared_ptr<Stream> remove_stream(Handle handle);
std::shared_ptr<Event> remove_event(Handle handle);

// Every stream, default streams included, also those that were destroyed with work in their queue.
std::vector<std::shared_ptr<Stream>> all_streams();
std::vector<std::shared_ptr<Stream>> living_streams();  // without default streams
std::vector<std::shared_ptr<Event>> living_events();

}  // namespace simgpu
