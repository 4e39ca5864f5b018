// The one table of the core's options: name, environment variable, default, meaning.
//
// Options are for studying and testing; nobody needs one to train. Python shows the table
// (trae_mem.options), so that it never differs from what the core reads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace trae_mem {

struct OptionDescription {
  const char* name;           // as in HostDeviceOptions or LayerStreamerOptions
  const char* environment;    // read when the object is made
  const char* default_value;  // in the same spelling as the variable
  const char* meaning;
};

inline constexpr std::array<OptionDescription, 7> kOptions = {{
    {"link_bytes_per_second", "TRAE_MEM_HOST_LINK", "0",
     "speed of a host device's link in bytes/s; 0: as fast as memory is"},
    {"faults", "TRAE_MEM_HOST_FAULTS", "",
     "calls of a host device that fail: operation:N, comma separated, N counted from 1"},
    {"random_delay_us", "TRAE_MEM_HOST_DELAY", "0",
     "longest random delay before each piece of a host device's stream work, in microseconds"},
    {"seed", "TRAE_MEM_HOST_SEED", "0", "seed of those delays"},
    {"reader_threads", "TRAE_MEM_READER_THREADS", "2",
     "threads that read weight files, at least 1"},
    {"staging_bytes", "TRAE_MEM_STAGING", "8388608",
     "size of each of a GPU's two pinned staging buffers, at least 4096"},
    {"event_log_entries", "TRAE_MEM_EVENT_LOG", "65536",
     "events that the ring buffer keeps, at least 1"},
}};

// The value of the option: the environment's, or the default of the table.
// Throws InvalidArgument for an unknown name or a value that is not a number >= minimum.
std::uint64_t option_number(const std::string& name, std::uint64_t minimum = 0);
std::string option_text(const std::string& name);
// The name of its environment variable, for messages.
std::string option_variable(const std::string& name);

// A variable that is not ours and explains what others do (CUDA_VISIBLE_DEVICES), for messages.
std::optional<std::string> foreign_variable(const char* name);

}  // namespace trae_mem
