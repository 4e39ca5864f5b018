#include "options.h"

#include <charconv>
#include <cstdlib>

#include "error.h"

namespace trae_mem {
namespace {

const OptionDescription& describe(const std::string& name) {
  for (const OptionDescription& option : kOptions) {
    if (name == option.name) return option;
  }
  throw InvalidArgument("no option is called '" + name + "'");
}

}  // namespace

std::string option_text(const std::string& name) {
  const OptionDescription& option = describe(name);
  const char* value = std::getenv(option.environment);
  return value != nullptr ? value : option.default_value;
}

std::optional<std::string> foreign_variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

std::string option_variable(const std::string& name) { return describe(name).environment; }

std::uint64_t option_number(const std::string& name, std::uint64_t minimum) {
  const std::string text = option_text(name);
  std::uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || value < minimum) {
    throw InvalidArgument(std::string(describe(name).environment) + "='" + text +
                          "': expected a whole number of at least " + std::to_string(minimum));
  }
  return value;
}

}  // namespace trae_mem
