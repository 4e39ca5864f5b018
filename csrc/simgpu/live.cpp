#include "live.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "books.h"
#include "device.h"
#include "json.h"
#include "objects.h"
#include "reports.h"

namespace simgpu {
namespace {

struct Holdings {
  std::uint64_t handles = 0;
  std::uint64_t mapped_bytes = 0;
  std::uint64_t reservations = 0;
  std::uint64_t allocations = 0;
  std::uint64_t streams = 0;
  std::uint64_t events = 0;
  std::uint64_t pinned_bytes = 0;

  [[nodiscard]] std::vector<std::pair<const char*, std::uint64_t>> fields() const {
    return {{"handles", handles},           {"mapped_bytes", mapped_bytes},
            {"reservations", reservations}, {"allocations", allocations},
            {"streams", streams},           {"events", events},
            {"pinned_bytes", pinned_bytes}};
  }
};

std::map<const Library*, Holdings> holdings() {
  std::map<const Library*, Holdings> all;
  for (const auto& stream : living_streams()) ++all[&stream->owner()].streams;
  for (const auto& event : living_events()) ++all[&event->owner].events;
  const std::lock_guard lock(books().mutex);
  for (const auto& [id, handle] : books().space.handles()) ++all[handle.owner].handles;
  for (const auto& [address, reservation] : books().space.reservations()) {
    // A plain allocation's addresses come and go with its mapping.
    if (reservation.owner != nullptr) ++all[reservation.owner].reservations;
  }
  for (const auto& [address, mapping] : books().space.mappings()) {
    Holdings& held = all[mapping.owner];
    if (mapping.handle == 0) {
      ++held.allocations;
    }
    held.mapped_bytes += mapping.bytes;
  }
  for (const auto& [address, registration] : books().host.registrations()) {
    all[registration.owner].pinned_bytes += registration.bytes;
  }
  return all;
}

bool any_context_failed() {
  for (const Device* each : all_devices()) {
    if (each->failure() != Code::kOk) return true;
  }
  return false;
}

}  // namespace

std::string live_as_json() {
  Items libraries;
  for (const auto& [library, held] : holdings()) {
    Items fields;
    for (const auto& [name, value] : held.fields()) fields.add(name, std::to_string(value));
    libraries.add(library->name, fields.object());
  }
  return libraries.object();
}

void print_summary() {
  if (const std::size_t count = report_count(); count > 0) {
    std::fprintf(stderr, "simulated GPU: %zu reports of misuse in this process.\n", count);
  }
  // In a failed context nothing can be given back.
  if (any_context_failed()) return;
  for (const auto& [library, held] : holdings()) {
    if (!library->trae_mem) continue;
    std::string text;
    for (const auto& [name, value] : held.fields()) {
      if (value > 0)
        text += std::string(text.empty() ? "" : ", ") + name + " " + std::to_string(value);
    }
    std::fprintf(stderr, "simulated GPU: %s: %s still holds at exit: %s\n", kind::kLeak,
                 library->name.c_str(), text.c_str());
  }
}

}  // namespace simgpu
