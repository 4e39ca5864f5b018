#include "error.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <system_error>

namespace trae_mem {

std::string format_bytes(std::size_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text.data();
}

std::string with_errno(const std::string& what) {
  return what + ": " + std::generic_category().message(errno);
}

}  // namespace trae_mem
