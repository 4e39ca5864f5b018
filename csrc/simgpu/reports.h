// The sanitizer's findings: what was misused, and the stack of the host call that did it or that
// queued the work. Reports never end the process; the first ten go to stderr at once.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "simgpu.h"

namespace simgpu {

// Return addresses of a host call; resolved to names only when they are reported.
class Stack {
 public:
  static Stack capture();
  [[nodiscard]] std::string as_json() const;  // a list of "function (library)"
  [[nodiscard]] bool empty() const { return count_ == 0; }

 private:
  static constexpr int kDepth = 20;
  std::array<void*, kDepth> frames_{};
  int count_ = 0;
};

void report(const char* kind, const std::string& message, const Stack& stack);
// With the caller's own stack.
SIMGPU_API void report(const char* kind, const std::string& message);

std::string reports_as_json();
std::size_t report_count();
void clear_reports();

// "void f<int>(int)" of "_Z1fIiEvT_"; the name itself if it is not mangled.
SIMGPU_API std::string demangled(const char* name);

// The kinds; tests compare against these words.
namespace kind {
inline constexpr const char* kUnmapPending = "unmap under pending work";
inline constexpr const char* kFreePending = "free under pending work";
inline constexpr const char* kIllegalAddress = "illegal address";
inline constexpr const char* kPartialUnmap = "partial unmap";
inline constexpr const char* kMissingAccess = "missing set-access";
inline constexpr const char* kUnregisteredCopy = "copy from unregistered host memory";
inline constexpr const char* kUnrecordedWait = "wait on an event never recorded";
inline constexpr const char* kDoubleFree = "double free";
inline constexpr const char* kInvalidHandle = "invalid handle";
inline constexpr const char* kMappedRangeFreed = "address range freed while mapped";
inline constexpr const char* kCallInHostFunction = "API call in a host function";
inline constexpr const char* kNoCpuKernel = "kernel without a CPU implementation";
inline constexpr const char* kLeak = "leak";
}  // namespace kind

}  // namespace simgpu
