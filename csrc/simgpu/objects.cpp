#include "objects.h"

#include <cstdio>
#include <list>
#include <map>
#include <string>
#include <unordered_map>

#include "device.h"
#include "process.h"
#include "reports.h"

namespace simgpu {
namespace {

constexpr Handle kStreams = 0x5700'0000'0000;
constexpr Handle kEvents = 0xE700'0000'0000;
constexpr Handle kStep = 16;
constexpr Handle kPerThreadDefault = 2;

template <typename Object>
struct Table {
  std::map<Handle, std::shared_ptr<Object>> living;
  Handle made = 0;  // how many there ever were

  Handle add(Handle base, std::shared_ptr<Object> object) {
    const Handle handle = base + kStep * ++made;
    living.emplace(handle, std::move(object));
    return handle;
  }
};

struct Objects {
  std::mutex mutex;
  Table<Stream> streams;
  Table<Event> events;
  std::list<std::weak_ptr<Stream>> retired;  // destroyed, perhaps with work in the queue
};

Objects& objects() {
  static Objects& made = immortal<Objects>();
  return made;
}

template <typename Object>
std::shared_ptr<Object> find(Table<Object>& table, Handle base, Handle handle, const char* what,
                             bool remove) {
  bool was_one = false;
  {
    const std::lock_guard lock(objects().mutex);
    const auto found = table.living.find(handle);
    if (found != table.living.end()) {
      std::shared_ptr<Object> object = found->second;
      if (remove) table.living.erase(found);
      return object;
    }
    was_one = handle > base && handle <= base + kStep * table.made && handle % kStep == 0;
  }
  char number[32];
  std::snprintf(number, sizeof number, "0x%zx", static_cast<std::size_t>(handle));
  const Call* const call = Call::current();
  const std::string function = call == nullptr ? "a call" : call->name();
  if (was_one && remove) {
    report(kind::kDoubleFree, function + ": " + what + " " + number + " was destroyed before.");
  } else {
    report(kind::kInvalidHandle, function + ": " + what + " " + number +
                                     (was_one ? " was destroyed." : " never existed."));
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<Completion> Event::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

void Event::set_last(std::shared_ptr<Completion> point) {
  const std::lock_guard lock(mutex_);
  last_ = std::move(point);
}

Handle add_stream(Device& device, int priority, unsigned flags) {
  const std::lock_guard lock(objects().mutex);
  Table<Stream>& table = objects().streams;
  return table.add(kStreams, std::make_shared<Stream>(device, table.made + 1, priority, flags,
                                                      current_library()));
}

Handle add_event(Device& device, bool timed) {
  auto made = std::make_shared<Event>(device, timed, current_library());
  const std::lock_guard lock(objects().mutex);
  return objects().events.add(kEvents, std::move(made));
}

std::shared_ptr<Stream> find_stream(Handle handle) {
  if (handle <= kPerThreadDefault) {
    const int current = current_device();
    return device(current == kNoDevice ? 0 : current).share_default_stream();
  }
  return find(objects().streams, kStreams, handle, "stream", false);
}

std::shared_ptr<Event> find_event(Handle handle) {
  return find(objects().events, kEvents, handle, "event", false);
}

std::shared_ptr<Stream> remove_stream(Handle handle) {
  std::shared_ptr<Stream> stream = find(objects().streams, kStreams, handle, "stream", true);
  if (stream != nullptr) {
    const std::lock_guard lock(objects().mutex);
    objects().retired.remove_if([](const auto& gone) { return gone.expired(); });
    objects().retired.push_back(stream);
  }
  return stream;
}

std::shared_ptr<Event> remove_event(Handle handle) {
  return find(objects().events, kEvents, handle, "event", true);
}

std::vector<std::shared_ptr<Stream>> all_streams() {
  std::vector<std::shared_ptr<Stream>> all = living_streams();
  for (Device* each : all_devices()) all.push_back(each->share_default_stream());
  const std::lock_guard lock(objects().mutex);
  for (const std::weak_ptr<Stream>& gone : objects().retired) {
    if (std::shared_ptr<Stream> stream = gone.lock()) all.push_back(std::move(stream));
  }
  return all;
}

std::vector<std::shared_ptr<Stream>> living_streams() {
  const std::lock_guard lock(objects().mutex);
  std::vector<std::shared_ptr<Stream>> all;
  for (const auto& [handle, stream] : objects().streams.living) all.push_back(stream);
  return all;
}

std::vector<std::shared_ptr<Event>> living_events() {
  const std::lock_guard lock(objects().mutex);
  std::vector<std::shared_ptr<Event>> all;
  for (const auto& [handle, event] : objects().events.living) all.push_back(event);
  return all;
}

}  // namespace simgpu
