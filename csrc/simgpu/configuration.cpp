#include "configuration.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

#include "process.h"

namespace simgpu {
namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& value, const char* expected) {
  throw std::invalid_argument("TRAE_MEM_SIM: " + key + "=" + value + ": expected " + expected +
                              ".");
}

std::uint64_t whole(const std::string& key, const std::string& value) {
  char* end = nullptr;
  errno = 0;
  const unsigned long long number = std::strtoull(value.c_str(), &end, 10);
  if (value.empty() || value[0] == '-' || *end != '\0' || errno != 0) {
    refuse(key, value, "a whole number");
  }
  return number;
}

int count(const std::string& key, const std::string& value) {
  const std::uint64_t number = whole(key, value);
  if (number > 1'000'000) refuse(key, value, "a number up to 1000000");
  return static_cast<int>(number);
}

double rate(const std::string& key, const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !(number >= 0)) refuse(key, value, "a number, 0 or more");
  return number;
}

bool flag(const std::string& key, const std::string& value) {
  if (value == "0" || value == "1") return value == "1";
  refuse(key, value, "0 or 1");
}

void set(Configuration& made, const std::string& key, const std::string& value) {
  using Setter = std::function<void()>;
  const std::map<std::string, Setter> setters = {
      {"gpu", [&] { made.gpu = value; }},
      {"devices", [&] { made.devices = count(key, value); }},
      {"memory", [&] { made.memory = whole(key, value); }},
      {"link", [&] { made.link = rate(key, value); }},
      {"flops", [&] { made.flops = rate(key, value); }},
      {"bandwidth", [&] { made.bandwidth = rate(key, value); }},
      {"major", [&] { made.major = count(key, value); }},
      {"minor", [&] { made.minor = count(key, value); }},
      {"sms", [&] { made.sms = count(key, value); }},
      {"mode",
       [&] {
         if (value != "numeric" && value != "dry") refuse(key, value, "numeric or dry");
         made.dry = value == "dry";
       }},
      {"seed", [&] { made.seed = whole(key, value); }},
      {"delay_us", [&] { made.delay_us = whole(key, value); }},
      {"poison", [&] { made.poison = flag(key, value); }},
      {"pace", [&] { made.pace = flag(key, value); }},
  };
  const auto found = setters.find(key);
  if (found == setters.end()) {
    std::string known;
    for (const auto& [name, setter] : setters) known += (known.empty() ? "" : ", ") + name;
    throw std::invalid_argument("TRAE_MEM_SIM: unknown key \"" + key + "\"; known: " + known + ".");
  }
  found->second();
}

Configuration read_environment() {
  const char* text = std::getenv("TRAE_MEM_SIM");
  try {
    return parse_configuration(text == nullptr ? "" : text);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "simulated GPU: %s\n", error.what());
    std::exit(2);
  }
}

}  // namespace

Configuration parse_configuration(const std::string& text) {
  Configuration made;
  std::istringstream entries(text);
  std::string entry;
  while (std::getline(entries, entry, ',')) {
    if (entry.empty()) continue;
    const std::size_t equals = entry.find('=');
    if (equals == std::string::npos) {
      throw std::invalid_argument("TRAE_MEM_SIM: \"" + entry + "\" is not key=value.");
    }
    set(made, entry.substr(0, equals), entry.substr(equals + 1));
  }
  return made;
}

const Configuration& configuration() {
  static const Configuration& read = immortal<Configuration>(read_environment());
  return read;
}

int visible_devices(const Configuration& configuration, const char* variable) {
  if (variable == nullptr) return configuration.devices;
  // As documented: what follows the first index that is not valid is invisible.
  std::istringstream indices(variable);
  std::string index;
  int visible = 0;
  while (std::getline(indices, index, ',')) {
    char* end = nullptr;
    const long number = std::strtol(index.c_str(), &end, 10);
    if (end == index.c_str() || number < 0 || number >= configuration.devices) break;
    ++visible;
  }
  return visible;
}

}  // namespace simgpu
