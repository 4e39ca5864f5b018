#include "fault_plan.h"

#include <charconv>
#include <sstream>

#include "error.h"

namespace trae_mem {

FaultPlan::FaultPlan(const std::string& text) {
  std::istringstream stream(text);
  std::string item;
  while (std::getline(stream, item, ',')) {
    const std::size_t colon = item.find(':');
    std::uint64_t number = 0;
    bool complete = false;  // the number reaches to the item's end
    if (colon != std::string::npos) {
      const char* end = item.data() + item.size();
      complete = std::from_chars(item.data() + colon + 1, end, number).ptr == end;
    }
    if (colon == 0 || number == 0 || !complete) {
      throw InvalidArgument("fault '" + item + "': expected operation:N with N >= 1");
    }
    entries_[item.substr(0, colon)].fails_at.insert(number);
  }
}

void FaultPlan::check(std::string_view operation) {
  if (entries_.empty()) return;
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(operation);
  if (entry == entries_.end()) return;
  const std::uint64_t call = ++entry->second.calls;
  if (!entry->second.fails_at.contains(call)) return;
  throw DeviceError("injected fault: " + std::string(operation) + " number " +
                    std::to_string(call));
}

}  // namespace trae_mem
