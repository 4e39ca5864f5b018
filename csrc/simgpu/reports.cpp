#include "reports.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>

#include "json.h"
#include "process.h"

namespace simgpu {
namespace {

constexpr std::size_t kPrinted = 10;  // further ones are only counted and kept
constexpr std::size_t kKept = 1000;   // a loop that misuses must not fill the memory

struct Report {
  std::string kind;
  std::string message;
  std::string stack;  // JSON list
};

struct Reports {
  std::mutex mutex;
  std::deque<Report> entries;
  std::size_t count = 0;
  std::size_t printed = 0;
};

Reports& reports() {
  static Reports& made = immortal<Reports>();
  return made;
}

std::string frame_name(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return "?";
  std::string library = info.dli_fname == nullptr ? "?" : info.dli_fname;
  library = library.substr(library.rfind('/') + 1);
  if (info.dli_sname != nullptr) return demangled(info.dli_sname) + " (" + library + ")";
  char offset[40];
  std::snprintf(
      offset, sizeof offset, "+0x%zx",
      static_cast<std::size_t>(static_cast<char*>(address) - static_cast<char*>(info.dli_fbase)));
  return library + offset;
}

}  // namespace

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> made(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return status == 0 && made ? made.get() : name;
}

Stack Stack::capture() {
  Stack stack;
  stack.count_ = backtrace(stack.frames_.data(), kDepth);
  return stack;
}

std::string Stack::as_json() const {
  Items items;
  bool inside = true;  // the simulator's own frames come first, and say nothing
  for (int i = 0; i < count_; ++i) {
    const std::string name = frame_name(frames_[static_cast<std::size_t>(i)]);
    if (inside && name.find("libsimgpu.so") != std::string::npos) continue;
    inside = false;
    items.add(quoted(name));
  }
  return items.list();
}

void report(const char* kind, const std::string& message, const Stack& stack) {
  const std::string frames = stack.as_json();
  const std::lock_guard lock(reports().mutex);
  ++reports().count;
  if (reports().entries.size() < kKept) reports().entries.push_back({kind, message, frames});
  if (reports().printed < kPrinted) {
    ++reports().printed;
    std::fprintf(stderr, "simulated GPU: %s: %s\n", kind, message.c_str());
  }
}

void report(const char* kind, const std::string& message) {
  report(kind, message, Stack::capture());
}

std::string reports_as_json() {
  const std::lock_guard lock(reports().mutex);
  Items items;
  for (const Report& entry : reports().entries) {
    Items fields;
    fields.add("kind", quoted(entry.kind));
    fields.add("message", quoted(entry.message));
    fields.add("stack", entry.stack);
    items.add(fields.object());
  }
  return items.list();
}

std::size_t report_count() {
  const std::lock_guard lock(reports().mutex);
  return reports().count;
}

void clear_reports() {
  const std::lock_guard lock(reports().mutex);
  reports().entries.clear();
  reports().count = 0;
  reports().printed = 0;
}

}  // namespace simgpu
