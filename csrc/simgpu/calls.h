// Every API call passes through a `Call`: it is counted by function and calling library, refused
// where the API would refuse it (no context, a failed one, a forked child, a planned fault), and
// it is what a report and an object's owner are taken from while it lasts.
//
// The caller is the library that holds the call's return address (dladdr).
#pragma once

#include <cstdint>
#include <string>

#include "codes.h"

namespace simgpu {

struct Library {
  std::string name;  // file name: "libc10_cuda.so"
  bool trae_mem;     // ours: the extension module, or its native tests
};

struct FunctionRecord;  // one API function's counters

// The counters of `name`, made at the first call. A version suffix (_v2) is not part of the name.
SIMGPU_API FunctionRecord& function(const char* name);

// What a call needs, and so why it may be refused.
enum class Needs {
  kNothing,         // asks for a name or a version
  kDriver,          // an initialised driver
  kContext,         // a current context that has not failed
  kRuntime,         // the runtime initialises the driver itself, asks for no context
  kRuntimeContext,  // … and makes the device's primary context current
};

class SIMGPU_API Call {
 public:
  Call(FunctionRecord& function, Needs needs, const void* return_address);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] Code refusal() const { return refusal_; }  // kOk: go on

  // The innermost call of this thread, or null.
  static const Call* current();
  // Notes that the current call makes the host wait for the device.
  static void note_blocking();

  [[nodiscard]] const Library& caller() const { return *caller_; }
  [[nodiscard]] const char* name() const;

 private:
  Code refuse(Needs needs);

  FunctionRecord& function_;
  const Library* caller_;
  Call* outer_;
  Code refusal_ = Code::kOk;
  bool blocking_ = false;
};

// Who made an object: the current call's library, or "(unknown)".
const Library& current_library();
const Library& library_at(const void* address);

// Counts a call of a function that exists but is not modelled; says so once for each function.
SIMGPU_API Code unsupported(const char* name, const void* return_address);

std::string calls_as_json();
void reset_calls();

}  // namespace simgpu
