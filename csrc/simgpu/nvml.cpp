// libnvidia-ml.so.1: what PyTorch, nvidia-ml-py and trae_mem ask a card about itself. Types are
// declared here as nvml.h has them, since pip's CUDA packages do not carry that header.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include <cstdint>
#include <string>

#include "card.h"
#include "simgpu.h"

namespace {

using nvmlDevice_t = void*;
using nvmlReturn_t = int;

constexpr nvmlReturn_t kSuccess = 0;
constexpr nvmlReturn_t kInvalidArgument = 2;
constexpr nvmlReturn_t kNotSupported = 3;
constexpr nvmlReturn_t kNotFound = 6;
constexpr nvmlReturn_t kInsufficientSize = 7;

struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct ProcessV1 {
  unsigned pid;
  unsigned long long used;
};
struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};
struct PciInfo {
  char legacy_bus_id[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};

// A handle is the card's index plus one.
nvmlDevice_t handle_of(int card) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(card) + 1);
}
int card_of(nvmlDevice_t handle) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)) - 1;
}
bool exists(int card) { return card >= 0 && card < simgpu::card_count(); }

nvmlReturn_t find(int card, nvmlDevice_t* handle) {
  if (!exists(card)) return kNotFound;
  *handle = handle_of(card);
  return kSuccess;
}

nvmlReturn_t put_text(const std::string& text, char* out, unsigned size) {
  if (text.size() + 1 > size) return kInsufficientSize;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return kSuccess;
}

// Only this process is known, and it has the whole card.
template <typename Info>
nvmlReturn_t processes(nvmlDevice_t handle, unsigned* count, Info* infos) {
  const int card = card_of(handle);
  if (!exists(card)) return kInvalidArgument;
  const std::size_t used = simgpu::card_memory_used(card);
  const unsigned room = *count;
  *count = used > 0 ? 1 : 0;
  if (room < *count || (*count > 0 && infos == nullptr)) return kInsufficientSize;
  if (used > 0) {
    infos[0] = {};
    infos[0].pid = static_cast<unsigned>(getpid());
    infos[0].used = used;
  }
  return kSuccess;
}

nvmlReturn_t pci_info(nvmlDevice_t handle, PciInfo* info) {
  const int card = card_of(handle);
  if (!exists(card)) return kInvalidArgument;
  *info = {};
  info->bus = static_cast<unsigned>(card) + 1;
  const std::string id = simgpu::card_bus_id(card);
  std::snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "%s", id.c_str());
  std::snprintf(info->bus_id, sizeof info->bus_id, "0000%s", id.c_str());
  return kSuccess;
}

}  // namespace

#define NVML extern "C" SIMGPU_API nvmlReturn_t

NVML nvmlInit() { return kSuccess; }
NVML nvmlInit_v2() { return kSuccess; }
NVML nvmlInitWithFlags(unsigned) { return kSuccess; }
NVML nvmlShutdown() { return kSuccess; }

extern "C" SIMGPU_API const char* nvmlErrorString(nvmlReturn_t code) {
  switch (code) {
    case kSuccess:
      return "Success";
    case kInvalidArgument:
      return "Invalid Argument";
    case kNotSupported:
      return "Not Supported";
    case kNotFound:
      return "Not Found";
    case kInsufficientSize:
      return "Insufficient Size";
    default:
      return "Unknown Error";
  }
}

NVML nvmlSystemGetDriverVersion(char* out, unsigned size) {
  return put_text("580.00 (simulated)", out, size);
}
NVML nvmlSystemGetNVMLVersion(char* out, unsigned size) {
  return put_text("13.580.00 (simulated)", out, size);
}
NVML nvmlSystemGetCudaDriverVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
NVML nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return nvmlSystemGetCudaDriverVersion(version);
}

NVML nvmlDeviceGetCount(unsigned* count) {
  *count = static_cast<unsigned>(simgpu::card_count());
  return kSuccess;
}
NVML nvmlDeviceGetCount_v2(unsigned* count) { return nvmlDeviceGetCount(count); }

NVML nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* handle) {
  return find(static_cast<int>(index), handle);
}
NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* handle) {
  return nvmlDeviceGetHandleByIndex(index, handle);
}
NVML nvmlDeviceGetHandleByPciBusId(const char* id, nvmlDevice_t* handle) {
  return find(simgpu::card_with_bus_id(id), handle);
}
NVML nvmlDeviceGetHandleByPciBusId_v2(const char* id, nvmlDevice_t* handle) {
  return nvmlDeviceGetHandleByPciBusId(id, handle);
}
NVML nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* handle) {
  return find(simgpu::card_with_uuid(uuid), handle);
}

NVML nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned* index) {
  if (!exists(card_of(handle))) return kInvalidArgument;
  *index = static_cast<unsigned>(card_of(handle));
  return kSuccess;
}
NVML nvmlDeviceGetName(nvmlDevice_t handle, char* out, unsigned size) {
  return exists(card_of(handle)) ? put_text(simgpu::card_name(), out, size) : kInvalidArgument;
}
NVML nvmlDeviceGetUUID(nvmlDevice_t handle, char* out, unsigned size) {
  if (!exists(card_of(handle))) return kInvalidArgument;
  return put_text(simgpu::card_uuid_text(card_of(handle)), out, size);
}
NVML nvmlDeviceGetPciInfo(nvmlDevice_t handle, PciInfo* info) { return pci_info(handle, info); }
NVML nvmlDeviceGetPciInfo_v2(nvmlDevice_t handle, PciInfo* info) { return pci_info(handle, info); }
NVML nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, PciInfo* info) { return pci_info(handle, info); }
NVML nvmlDeviceGetCudaComputeCapability(nvmlDevice_t, int* major, int* minor) {
  *major = simgpu::card_major();
  *minor = simgpu::card_minor();
  return kSuccess;
}

NVML nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, Memory* memory) {
  const int card = card_of(handle);
  if (!exists(card)) return kInvalidArgument;
  memory->total = simgpu::card_memory(card);
  memory->used = std::min<unsigned long long>(simgpu::card_memory_used(card), memory->total);
  memory->free = memory->total - memory->used;
  return kSuccess;
}
NVML nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, MemoryV2* memory) {
  Memory plain{};
  const nvmlReturn_t code = nvmlDeviceGetMemoryInfo(handle, &plain);
  memory->total = plain.total;
  memory->reserved = 0;
  memory->free = plain.free;
  memory->used = plain.used;
  return code;
}

// Nothing measures how busy a simulated card is.
NVML nvmlDeviceGetUtilizationRates(nvmlDevice_t, Utilization* utilization) {
  *utilization = {};
  return kSuccess;
}

NVML nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t handle, unsigned* count, ProcessV1* infos) {
  return processes(handle, count, infos);
}
NVML nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, unsigned* count, Process* infos) {
  return processes(handle, count, infos);
}
NVML nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned* count, Process* infos) {
  return processes(handle, count, infos);
}
NVML nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned* count, Process*) {
  *count = 0;
  return kSuccess;
}

#define NVML_NOT_SUPPORTED(name) \
  NVML name() { return kNotSupported; }

NVML_NOT_SUPPORTED(nvmlDeviceGetTemperature)
NVML_NOT_SUPPORTED(nvmlDeviceGetPowerUsage)
NVML_NOT_SUPPORTED(nvmlDeviceGetClockInfo)
NVML_NOT_SUPPORTED(nvmlDeviceGetP2PStatus)
NVML_NOT_SUPPORTED(nvmlDeviceGetNvLinkState)
NVML_NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NVML_NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NVML_NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfo)

// PyTorch asks before it maps memory for other nodes: there is no fabric.
NVML nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, FabricInfo* info) {
  info->state = 0;  // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
  return kSuccess;
}
