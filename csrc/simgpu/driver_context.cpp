// libcuda.so.1: initialisation, devices, contexts, errors.
#include <cstdio>

#include "card.h"
#include "driver.h"
#include "process.h"

using simgpu::Code;

namespace {

bool exists(CUdevice device) { return device >= 0 && device < simgpu::device_count(); }

}  // namespace

SIMGPU_EXPORT CUresult cuInit(unsigned int flags) {
  SIMGPU_ENTER("cuInit", kNothing);
  return flags == 0 ? result(simgpu::initialize()) : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT CUresult cuDriverGetVersion(int* version) {
  SIMGPU_ENTER("cuDriverGetVersion", kNothing);
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  const simgpu::CodeText* const found = simgpu::describe(error);
  *name = found == nullptr ? nullptr : found->driver;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  const simgpu::CodeText* const found = simgpu::describe(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceGetCount(int* count) {
  SIMGPU_ENTER("cuDeviceGetCount", kDriver);
  *count = simgpu::device_count();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  SIMGPU_ENTER("cuDeviceGet", kDriver);
  if (!exists(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  SIMGPU_ENTER("cuDeviceGetName", kDriver);
  if (!exists(device) || size <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, static_cast<size_t>(size), "%s", simgpu::card_name().c_str());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  SIMGPU_ENTER("cuDeviceGetUuid", kDriver);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  simgpu::card_uuid(device, reinterpret_cast<unsigned char*>(uuid->bytes));
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  SIMGPU_ENTER("cuDeviceTotalMem", kDriver);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = simgpu::card_memory(device);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                            CUdevice device) {
  SIMGPU_ENTER("cuDeviceGetAttribute", kDriver);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  return result(simgpu::card_attribute(value, attribute, device));
}

SIMGPU_EXPORT CUresult cuDeviceGetPCIBusId(char* id, int size, CUdevice device) {
  SIMGPU_ENTER("cuDeviceGetPCIBusId", kDriver);
  if (!exists(device) || size <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(id, static_cast<size_t>(size), "%s", simgpu::card_bus_id(device).c_str());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  SIMGPU_ENTER("cuDeviceCanAccessPeer", kDriver);
  *can = 0;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  SIMGPU_ENTER("cuDevicePrimaryCtxRetain", kDriver);
  const Code code = simgpu::retain_primary(device);
  if (code == Code::kOk) *context = context_of(device);
  return result(code);
}

SIMGPU_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  SIMGPU_ENTER("cuDevicePrimaryCtxRelease", kDriver);
  return result(simgpu::release_primary(device));
}

SIMGPU_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags,
                                                  int* active) {
  SIMGPU_ENTER("cuDevicePrimaryCtxGetState", kDriver);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = simgpu::primary_is_active(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int) {
  SIMGPU_ENTER("cuDevicePrimaryCtxSetFlags", kDriver);
  return exists(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

namespace {

bool is_context(CUcontext context) { return context == nullptr || exists(device_of(context)); }

int device_or_none(CUcontext context) {
  return context == nullptr ? simgpu::kNoDevice : device_of(context);
}

}  // namespace

SIMGPU_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  SIMGPU_ENTER("cuCtxGetCurrent", kDriver);
  const int device = simgpu::current_device();
  *context = device == simgpu::kNoDevice ? nullptr : context_of(device);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  SIMGPU_ENTER("cuCtxSetCurrent", kDriver);
  if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  simgpu::set_current_device(device_or_none(context));
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  SIMGPU_ENTER("cuCtxPushCurrent", kDriver);
  if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  simgpu::push_device(device_or_none(context));
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  SIMGPU_ENTER("cuCtxPopCurrent", kDriver);
  int device = simgpu::kNoDevice;
  const Code code = simgpu::pop_device(&device);
  if (context != nullptr) {
    *context = device == simgpu::kNoDevice ? nullptr : context_of(device);
  }
  return result(code);
}

SIMGPU_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  SIMGPU_ENTER("cuCtxGetDevice", kDriver);
  if (simgpu::current_device() == simgpu::kNoDevice) return CUDA_ERROR_INVALID_CONTEXT;
  *device = simgpu::current_device();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuCtxGetApiVersion(CUcontext, unsigned int* version) {
  SIMGPU_ENTER("cuCtxGetApiVersion", kDriver);
  *version = 3020;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SIMGPU_ENTER("cuCtxGetStreamPriorityRange", kContext);
  if (least != nullptr) *least = simgpu::kLowestPriority;
  if (greatest != nullptr) *greatest = simgpu::kHighestPriority;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuCtxSynchronize(void) {
  SIMGPU_ENTER("cuCtxSynchronize", kContext);
  return result(simgpu::synchronize_current_device());
}

#if CUDA_VERSION >= 12090
// The driver would log through it what the simulator writes to stderr.
SIMGPU_EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*,
                                              CUlogsCallbackHandle* callback) {
  SIMGPU_ENTER("cuLogsRegisterCallback", kNothing);
  *callback = nullptr;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) {
  SIMGPU_ENTER("cuLogsUnregisterCallback", kNothing);
  return CUDA_SUCCESS;
}
#endif
