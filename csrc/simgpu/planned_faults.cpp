#include "planned_faults.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <vector>

#include "process.h"

namespace simgpu {
namespace {

struct Plan {
  std::string function;
  std::string caller;
  std::uint64_t left;  // calls until it is due
  Code code;
  bool sticky;
};

struct Plans {
  std::mutex mutex;
  std::vector<Plan> entries;
  std::atomic<bool> any = false;  // spares the lock of calls while there is no plan
};

Plans& plans() {
  static Plans& made = immortal<Plans>();
  return made;
}

bool allocates(std::string_view function) {
  constexpr std::string_view parts[] = {"Create", "Alloc", "Malloc", "Reserve", "Register", "Map"};
  // Streams and events are created too, but not for want of memory.
  if (function.find("Stream") != std::string_view::npos) return false;
  if (function.find("Event") != std::string_view::npos) return false;
  if (function.find("Unregister") != std::string_view::npos) return false;
  return std::any_of(std::begin(parts), std::end(parts), [function](std::string_view part) {
    return function.find(part) != std::string_view::npos;
  });
}

std::string plain_name(const std::string& name) {
  const std::size_t at = name.rfind("_v");
  const bool version = at != std::string::npos && at + 2 < name.size() &&
                       name.find_first_not_of("0123456789", at + 2) == std::string::npos;
  return version ? name.substr(0, at) : name;
}

}  // namespace

void plan_fault(const std::string& function, std::uint64_t nth, int code, bool sticky,
                const std::string& caller) {
  const std::string name = plain_name(function);
  const Code fitting = allocates(name) ? Code::kOutOfMemory : Code::kUnknown;
  const Code chosen = code == 0 ? fitting : static_cast<Code>(code);
  const std::lock_guard lock(plans().mutex);
  plans().entries.push_back({name, caller, std::max<std::uint64_t>(nth, 1), chosen, sticky});
  plans().any = true;
}

PlannedFault take_planned_fault(const std::string& function, const std::string& caller) {
  if (!plans().any) return {};
  const std::lock_guard lock(plans().mutex);
  PlannedFault taken;
  std::vector<Plan>& entries = plans().entries;
  for (auto plan = entries.begin(); plan != entries.end();) {
    const bool meant = plan->function == function && caller.find(plan->caller) != std::string::npos;
    if (!meant || --plan->left > 0) {
      ++plan;
      continue;
    }
    if (!taken.due) taken = {true, plan->code, plan->sticky};
    plan = entries.erase(plan);
  }
  plans().any = !entries.empty();
  return taken;
}

void forget_planned_faults() {
  const std::lock_guard lock(plans().mutex);
  plans().entries.clear();
  plans().any = false;
}

}  // namespace simgpu
