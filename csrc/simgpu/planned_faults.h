// Faults on demand: the nth call of a function fails, whoever asks for it by simgpu_fail.
#pragma once

#include <cstdint>
#include <string>

#include "codes.h"

namespace simgpu {

struct PlannedFault {
  bool due = false;
  Code code = Code::kOk;
  bool sticky = false;
};

// `nth` counts from the next call; `caller` is a part of a library's file name, "" for any.
void plan_fault(const std::string& function, std::uint64_t nth, int code, bool sticky,
                const std::string& caller);
// Counts one call against the plans.
PlannedFault take_planned_fault(const std::string& function, const std::string& caller);
void forget_planned_faults();

}  // namespace simgpu
