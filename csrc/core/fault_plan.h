// Faults on demand: "copy:3,map:1" makes the third copy and the first map of a device fail; an
// operation may stand in the list more than once.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace trae_mem {

class FaultPlan {
 public:
  // Throws InvalidArgument if `text` is not a list of operation:N with N >= 1.
  explicit FaultPlan(const std::string& text);

  // Counts one call of the operation; throws DeviceError if it is the one planned to fail.
  void check(std::string_view operation);

 private:
  struct Entry {
    std::set<std::uint64_t> fails_at;  // which calls fail, counted from 1
    std::uint64_t calls = 0;           // calls so far
  };
  std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace trae_mem
