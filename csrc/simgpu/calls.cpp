#include "calls.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>

#include "json.h"
#include "planned_faults.h"
#include "process.h"

namespace simgpu {

struct FunctionRecord {
  std::string name;
  std::map<const Library*, std::uint64_t> calls;
  std::map<const Library*, std::uint64_t> blocking;
  bool said_unsupported = false;
};

namespace {

thread_local Call* innermost = nullptr;

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<FunctionRecord>, std::less<>> functions;
  std::map<std::string, std::unique_ptr<Library>, std::less<>> libraries;
};

Registry& registry() {
  static Registry& made = immortal<Registry>();
  return made;
}

// "cuMemAlloc_v2" -> "cuMemAlloc"
std::string_view without_version(std::string_view name) {
  const std::size_t at = name.rfind("_v");
  if (at == std::string_view::npos || at + 2 == name.size()) return name;
  const bool digits = name.find_first_not_of("0123456789", at + 2) == std::string_view::npos;
  return digits ? name.substr(0, at) : name;
}

const Library& library_named(std::string_view name) {
  const std::lock_guard lock(registry().mutex);
  auto found = registry().libraries.find(name);
  if (found == registry().libraries.end()) {
    const bool ours = name.starts_with("_native") || name.starts_with("native_tests");
    auto made = std::make_unique<Library>(Library{std::string(name), ours});
    found = registry().libraries.emplace(std::string(name), std::move(made)).first;
  }
  return *found->second;
}

const Library& look_up(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return library_named("(unknown)");
  const std::string_view path = info.dli_fname;
  return library_named(path.substr(path.rfind('/') + 1));
}

}  // namespace

const Library& library_at(const void* address) {
  // dladdr takes a lock and searches; an application calls from few places.
  thread_local std::unordered_map<const void*, const Library*> known;
  const Library*& library = known[address];
  if (library == nullptr) library = &look_up(address);
  return *library;
}

const Library& current_library() {
  static const Library& unknown = immortal<Library>("(unknown)", false);
  return innermost == nullptr ? unknown : innermost->caller();
}

FunctionRecord& function(const char* name) {
  const std::string_view plain = without_version(name);
  const std::lock_guard lock(registry().mutex);
  auto found = registry().functions.find(plain);
  if (found == registry().functions.end()) {
    auto made = std::make_unique<FunctionRecord>();
    made->name = plain;
    found = registry().functions.emplace(std::string(plain), std::move(made)).first;
  }
  return *found->second;
}

Call::Call(FunctionRecord& function, Needs needs, const void* return_address)
    : function_(function),
      caller_(in_forked_child() ? &current_library() : &library_at(return_address)),
      outer_(innermost) {
  innermost = this;
  if (in_forked_child()) {
    // Another thread of the parent may have held the lock when it forked.
    refusal_ = Code::kNotInitialized;
    return;
  }
  {
    const std::lock_guard lock(registry().mutex);
    ++function_.calls[caller_];
  }
  refusal_ = refuse(needs);
}

Call::~Call() {
  innermost = outer_;
  if (!blocking_) return;
  const std::lock_guard lock(registry().mutex);
  ++function_.blocking[caller_];
}

Code Call::refuse(Needs needs) {
  if (const Code code = process_refusal(); code != Code::kOk) return code;
  if (const PlannedFault fault = take_planned_fault(function_.name, caller_->name); fault.due) {
    if (fault.sticky) fail_current_context(fault.code, "planned fault in " + function_.name);
    return fault.code;
  }
  switch (needs) {
    case Needs::kNothing:
      return Code::kOk;
    case Needs::kDriver:
      return initialized() ? Code::kOk : Code::kNotInitialized;
    case Needs::kContext:
      return initialized() ? context_refusal() : Code::kNotInitialized;
    case Needs::kRuntime:
      return initialize();
    case Needs::kRuntimeContext:
      if (const Code code = enter_runtime_context(); code != Code::kOk) return code;
      return context_refusal();
  }
  return Code::kUnknown;
}

const Call* Call::current() { return innermost; }

void Call::note_blocking() {
  if (innermost != nullptr) innermost->blocking_ = true;
}

const char* Call::name() const { return function_.name.c_str(); }

namespace {

// What the caller may do instead, for the families that PyTorch can be told to use.
const char* advice_for(std::string_view name) {
  struct Family {
    const char* part;
    const char* advice;
  };
  constexpr Family kFamilies[] = {
      {"MemPool",
       " Memory pools are not modelled: use PyTorch's native allocator, with or without "
       "expandable_segments, not cudaMallocAsync."},
      {"Graph", " CUDA graphs are not modelled."},
      {"Capture", " CUDA graphs are not modelled."},
      {"Ipc", " Device memory cannot be shared with other processes."},
      {"Module", " Device code cannot be loaded: no Triton, no nvrtc."},
      {"Library", " Device code cannot be loaded: no Triton, no nvrtc."},
  };
  if (name.find("MallocAsync") != std::string_view::npos) return kFamilies[0].advice;
  for (const Family& family : kFamilies) {
    if (name.find(family.part) != std::string_view::npos) return family.advice;
  }
  return "";
}

}  // namespace

Code unsupported(const char* name, const void* return_address) {
  FunctionRecord& record = function(name);
  const Call call(record, Needs::kNothing, return_address);
  if (call.refusal() != Code::kOk) return call.refusal();
  const std::lock_guard lock(registry().mutex);
  if (!record.said_unsupported) {
    record.said_unsupported = true;
    std::fprintf(stderr,
                 "simulated GPU: %s, called from %s, is not modelled; it returns "
                 "\"operation not supported\" (801).%s\n",
                 name, call.caller().name.c_str(), advice_for(name));
  }
  return Code::kNotSupported;
}

namespace {

std::string by_library(const std::map<const Library*, std::uint64_t>& counts) {
  Items items;
  for (const auto& [library, count] : counts) items.add(library->name, std::to_string(count));
  return items.object();
}

std::uint64_t total(const std::map<const Library*, std::uint64_t>& counts) {
  std::uint64_t sum = 0;
  for (const auto& [library, count] : counts) sum += count;
  return sum;
}

}  // namespace

std::string calls_as_json() {
  const std::lock_guard lock(registry().mutex);
  Items functions;
  for (const auto& [name, record] : registry().functions) {
    if (record->calls.empty()) continue;
    Items items;
    items.add("count", std::to_string(total(record->calls)));
    items.add("blocking", std::to_string(total(record->blocking)));
    items.add("by", by_library(record->calls));
    items.add("blocking_by", by_library(record->blocking));
    functions.add(name, items.object());
  }
  return functions.object();
}

void reset_calls() {
  const std::lock_guard lock(registry().mutex);
  for (const auto& [name, record] : registry().functions) {
    record->calls.clear();
    record->blocking.clear();
  }
}

}  // namespace simgpu
