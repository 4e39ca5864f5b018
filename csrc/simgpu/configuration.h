// What is simulated: read once from the environment variable TRAE_MEM_SIM, `key=value` separated
// by commas. A text that cannot be understood ends the process at once: a test that silently ran
// on other settings would prove nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace simgpu {

struct Configuration {
  std::string gpu = "Simulated GPU";              // gpu: the card's name
  int devices = 1;                                // devices: how many of them
  std::uint64_t memory = std::uint64_t{2} << 30;  // memory: bytes of each
  double link = 0;                                // link: bytes/s to and from the host, 0: no limit
  double flops = 100e12;                          // flops: FLOP/s of matrix products
  double bandwidth = 600e9;                       // bandwidth: bytes/s of device memory
  int major = 8;                                  // major, minor: compute capability
  int minor = 6;
  int sms = 72;                // sms: multiprocessors
  bool dry = false;            // mode: numeric | dry
  std::uint64_t seed = 0;      // seed: of the delays
  std::uint64_t delay_us = 0;  // delay_us: longest random delay
  bool poison = false;         // poison: 1 fills memory that is fresh or given back
  bool pace = false;           // pace: 1 lets work take its modelled time
};

// Throws std::invalid_argument, which names the key and what it may be.
Configuration parse_configuration(const std::string& text);

// The process's configuration. `visible` devices: CUDA_VISIBLE_DEVICES is honoured.
const Configuration& configuration();
int visible_devices(const Configuration& configuration, const char* variable);

}  // namespace simgpu
