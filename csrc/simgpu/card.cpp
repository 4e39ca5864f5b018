#include "card.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <map>

#include "configuration.h"
#include "device.h"
#include "process.h"

namespace simgpu {
namespace {

// CUDA programming guide, "Technical Specifications per Compute Capability".
struct Limits {
  int threads;        // per multiprocessor
  int blocks;         // per multiprocessor
  int shared_memory;  // per multiprocessor, bytes; a block may have 1 KiB less
};

Limits limits() {
  const Configuration& card = configuration();
  if (card.major >= 9) return {2048, 32, 233472};
  if (card.minor == 0) return {2048, 32, 167936};
  return {1536, card.minor == 9 ? 24 : 16, 102400};
}

// cuda.h, CUdevice_attribute.
struct Attributes {
  std::map<int, int> values = {
      {1, 1024},         // max threads per block
      {2, 1024},         // max block dimensions
      {3, 1024},         //
      {4, 64},           //
      {5, 2147483647},   // max grid dimensions
      {6, 65535},        //
      {7, 65535},        //
      {8, 49152},        // max shared memory per block
      {9, 65536},        // constant memory
      {10, 32},          // warp size
      {11, 2147483647},  // max pitch
      {12, 65536},       // max registers per block
      {13, 1695000},     // clock, kHz
      {14, 512},         // texture alignment
      {15, 1},           // copies overlap with compute
      {16, configuration().sms},
      {19, 1},                 // can map host memory
      {31, 1},                 // concurrent kernels
      {36, 6251000},           // memory clock, kHz
      {37, 384},               // memory bus width
      {38, 6 << 20},           // L2 cache
      {39, limits().threads},  // max threads per multiprocessor
      {40, 2},                 // copy engines
      {41, 1},                 // unified addressing
      {75, configuration().major},
      {76, configuration().minor},
      {78, 1},                              // stream priorities
      {79, 1},                              // global L1 cache
      {80, 1},                              // local L1 cache
      {81, limits().shared_memory},         // per multiprocessor
      {82, 65536},                          // registers per multiprocessor
      {95, 1},                              // cooperative launch
      {97, limits().shared_memory - 1024},  // opt-in shared memory per block
      {99, 1},                              // host registration
      {102, 1},                             // virtual memory management
      {103, 1},                             // POSIX file handles
      {106, limits().blocks},               // max blocks per multiprocessor
      {111, 1024},                          // reserved shared memory per block
  };
};

const std::map<int, int>& attributes() {
  static const Attributes& made = immortal<Attributes>();
  return made.values;
}

constexpr int kLastAttribute = 200;
constexpr int kPciBus = 33;

}  // namespace

int card_count() { return configuration().devices; }

std::string card_name() { return configuration().gpu; }

std::string card_bus_id(int device) {
  char text[32];
  std::snprintf(text, sizeof text, "0000:%02X:00.0", static_cast<unsigned>(device + 1));
  return text;
}

void card_uuid(int device, unsigned char* out) {
  // "SIMULATED GPU" and the ordinal.
  std::memcpy(out, "SIMULATED-GPU-\0\0", 16);
  out[15] = static_cast<unsigned char>(device);
}

std::string card_uuid_text(int device) {
  std::array<unsigned char, 16> bytes{};
  card_uuid(device, bytes.data());
  std::string text = "GPU-";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%02x", bytes[i]);
    text += digits;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

std::size_t card_memory(int ordinal) {
  return ordinal < device_count() ? device(ordinal).memory().capacity() : configuration().memory;
}

std::size_t card_memory_used(int ordinal) {
  return ordinal < device_count() ? device(ordinal).memory().used() : 0;
}

int card_major() { return configuration().major; }

int card_minor() { return configuration().minor; }

int card_multiprocessors() { return configuration().sms; }

Code card_attribute(int* value, int attribute, int device) {
  if (attribute <= 0 || attribute > kLastAttribute) return Code::kInvalidValue;
  const auto found = attributes().find(attribute);
  *value = found == attributes().end() ? 0 : found->second;
  if (attribute == kPciBus) *value = device + 1;
  return Code::kOk;
}

namespace {

template <typename Text>
int card_where(const std::string& wanted, Text text) {
  for (int i = 0; i < card_count(); ++i) {
    if (text(i) == wanted) return i;
  }
  return -1;
}

}  // namespace

int card_with_bus_id(const std::string& id) {
  // NVML writes the domain with eight digits, CUDA with four.
  const std::string shorter = id.size() == 16 ? id.substr(4) : id;
  return card_where(shorter, card_bus_id);
}

int card_with_uuid(const std::string& uuid) { return card_where(uuid, card_uuid_text); }

}  // namespace simgpu
