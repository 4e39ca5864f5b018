// What a simulated card says of itself, alike for driver, runtime and NVML.
#pragma once

#include <cstddef>
#include <string>

#include "codes.h"

namespace simgpu {

SIMGPU_API int card_count();         // all cards of the machine, whatever CUDA_VISIBLE_DEVICES says
SIMGPU_API std::string card_name();  // "NVIDIA A10 (simulated)"
SIMGPU_API std::string card_bus_id(int device);
SIMGPU_API std::string card_uuid_text(int device);          // "GPU-5349..."
SIMGPU_API void card_uuid(int device, unsigned char* out);  // 16 bytes
SIMGPU_API std::size_t card_memory(int device);
SIMGPU_API std::size_t card_memory_used(int device);
SIMGPU_API int card_major();
SIMGPU_API int card_minor();
SIMGPU_API int card_multiprocessors();

// CUdevice_attribute and cudaDeviceAttr share their numbers. What a card does not have is 0; a
// number beyond the attributes is kInvalidValue.
SIMGPU_API Code card_attribute(int* value, int attribute, int device);

// -1 if there is none.
SIMGPU_API int card_with_bus_id(const std::string& id);
SIMGPU_API int card_with_uuid(const std::string& uuid);

}  // namespace simgpu
