// libcuda.so.1: physical memory and addresses, plain allocations, host memory, what pointers are.
#include "driver.h"
#include "memory.h"

using simgpu::Code;

namespace {

void* host_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
std::uintptr_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

bool on_device(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

}  // namespace

SIMGPU_EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  SIMGPU_ENTER("cuMemGetInfo", kContext);
  return result(simgpu::memory_info(free, total));
}

// --- virtual memory management ------------------------------------------------------------------

SIMGPU_EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                                     const CUmemAllocationProp* properties,
                                                     CUmemAllocationGranularity_flags) {
  SIMGPU_ENTER("cuMemGetAllocationGranularity", kDriver);
  if (!on_device(properties->location)) return CUDA_ERROR_NOT_SUPPORTED;
  *granularity = size_t{2} << 20;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment,
                                           CUdeviceptr, unsigned long long) {
  SIMGPU_ENTER("cuMemAddressReserve", kContext);
  std::uintptr_t made = 0;
  const Code code = simgpu::reserve_addresses(&made, bytes, alignment);
  if (code == Code::kOk) *address = made;
  return result(code);
}

SIMGPU_EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  SIMGPU_ENTER("cuMemAddressFree", kContext);
  return result(simgpu::free_addresses(address, bytes));
}

SIMGPU_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                                   const CUmemAllocationProp* properties, unsigned long long) {
  SIMGPU_ENTER("cuMemCreate", kContext);
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (!on_device(properties->location)) return CUDA_ERROR_NOT_SUPPORTED;
  // Memory that other nodes may import needs hardware of its own; PyTorch asks, and falls back.
  if (properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  std::uint64_t made = 0;
  const Code code = simgpu::create_physical(&made, bytes, properties->location.id);
  if (code == Code::kOk) *handle = made;
  return result(code);
}

SIMGPU_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  SIMGPU_ENTER("cuMemRelease", kContext);
  return result(simgpu::release_physical(handle));
}

SIMGPU_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                                   void* address) {
  SIMGPU_ENTER("cuMemRetainAllocationHandle", kContext);
  std::uint64_t found = 0;
  const Code code = simgpu::retain_physical(&found, address_of(address));
  if (code == Code::kOk) *handle = found;
  return result(code);
}

SIMGPU_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                              CUmemGenericAllocationHandle handle) {
  SIMGPU_ENTER("cuMemGetAllocationPropertiesFromHandle", kContext);
  int device = 0;
  const Code code = simgpu::device_of_physical(&device, handle);
  if (code != Code::kOk) return result(code);
  *properties = {};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = device;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                                CUmemGenericAllocationHandle handle, unsigned long long) {
  SIMGPU_ENTER("cuMemMap", kContext);
  return result(simgpu::map_physical(address, bytes, offset, handle));
}

SIMGPU_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  SIMGPU_ENTER("cuMemUnmap", kContext);
  return result(simgpu::unmap(address, bytes));
}

SIMGPU_EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes,
                                      const CUmemAccessDesc* descriptions, size_t count) {
  SIMGPU_ENTER("cuMemSetAccess", kContext);
  for (size_t i = 0; i < count; ++i) {
    if (!on_device(descriptions[i].location)) return CUDA_ERROR_NOT_SUPPORTED;
    const bool allowed = descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const Code code = simgpu::set_access(address, bytes, descriptions[i].location.id, allowed);
    if (code != Code::kOk) return result(code);
  }
  return count > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                                      CUdeviceptr address) {
  SIMGPU_ENTER("cuMemGetAccess", kContext);
  if (!on_device(*location)) return CUDA_ERROR_NOT_SUPPORTED;
  bool allowed = false;
  const Code code = simgpu::has_access(&allowed, address, location->id);
  *flags = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return result(code);
}

// --- plain allocations --------------------------------------------------------------------------

SIMGPU_EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  SIMGPU_ENTER("cuMemAlloc", kContext);
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::uintptr_t made = 0;
  const Code code = simgpu::allocate(&made, bytes);
  if (code == Code::kOk) *address = made;
  return result(code);
}

SIMGPU_EXPORT CUresult cuMemFree(CUdeviceptr address) {
  SIMGPU_ENTER("cuMemFree", kContext);
  return result(simgpu::free_allocation(address));
}

SIMGPU_EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  SIMGPU_ENTER("cuMemGetAddressRange", kContext);
  const simgpu::AddressFacts facts = simgpu::facts_of(address);
  if (facts.place != simgpu::Place::kDevice || !facts.mapped) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = facts.base;
  if (bytes != nullptr) *bytes = facts.bytes;
  return CUDA_SUCCESS;
}

// --- host memory --------------------------------------------------------------------------------

SIMGPU_EXPORT CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
  SIMGPU_ENTER("cuMemHostAlloc", kContext);
  std::uintptr_t made = 0;
  const Code code = simgpu::allocate_host(&made, bytes, flags);
  if (code == Code::kOk) *pointer = host_pointer(made);
  return result(code);
}

SIMGPU_EXPORT CUresult cuMemAllocHost(void** pointer, size_t bytes) {
  SIMGPU_ENTER("cuMemAllocHost", kContext);
  std::uintptr_t made = 0;
  const Code code = simgpu::allocate_host(&made, bytes, 0);
  if (code == Code::kOk) *pointer = host_pointer(made);
  return result(code);
}

SIMGPU_EXPORT CUresult cuMemFreeHost(void* pointer) {
  SIMGPU_ENTER("cuMemFreeHost", kContext);
  return result(simgpu::free_host(address_of(pointer)));
}

SIMGPU_EXPORT CUresult cuMemHostRegister(void* pointer, size_t bytes, unsigned int flags) {
  SIMGPU_ENTER("cuMemHostRegister", kContext);
  return result(simgpu::register_host(address_of(pointer), bytes, flags));
}

SIMGPU_EXPORT CUresult cuMemHostUnregister(void* pointer) {
  SIMGPU_ENTER("cuMemHostUnregister", kContext);
  return result(simgpu::unregister_host(address_of(pointer)));
}

SIMGPU_EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* pointer,
                                                 unsigned int) {
  SIMGPU_ENTER("cuMemHostGetDevicePointer", kContext);
  const bool pinned = simgpu::facts_of(address_of(pointer)).place == simgpu::Place::kPinned;
  if (pinned) *address = address_of(pointer);
  return pinned ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT CUresult cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  SIMGPU_ENTER("cuMemHostGetFlags", kContext);
  const simgpu::AddressFacts facts = simgpu::facts_of(address_of(pointer));
  if (facts.place != simgpu::Place::kPinned) return CUDA_ERROR_INVALID_VALUE;
  *flags = facts.flags;
  return CUDA_SUCCESS;
}

// --- what a pointer is --------------------------------------------------------------------------

namespace {

template <typename T>
void put(void* out, T value) {
  *static_cast<T*>(out) = value;
}

CUresult pointer_attribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  const simgpu::AddressFacts facts = simgpu::facts_of(address);
  const bool device = facts.place == simgpu::Place::kDevice;
  if (facts.place == simgpu::Place::kPageable) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      put(out, context_of(facts.device));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      put<unsigned>(out, device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      put(out, address);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (device) return CUDA_ERROR_INVALID_VALUE;
      put(out, host_pointer(address));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      put<unsigned long long>(out, facts.buffer);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      put(out, facts.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      put(out, host_pointer(facts.base));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      put(out, facts.bytes);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      put(out, !device || facts.mapped);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      put(out, false);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      put(out, 0);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

SIMGPU_EXPORT CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute,
                                             CUdeviceptr address) {
  SIMGPU_ENTER("cuPointerGetAttribute", kContext);
  return pointer_attribute(out, attribute, address);
}

SIMGPU_EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes,
                                              void** out, CUdeviceptr address) {
  SIMGPU_ENTER("cuPointerGetAttributes", kContext);
  for (unsigned int i = 0; i < count; ++i) {
    // As documented: what does not apply to the pointer reads as zero, and the call succeeds.
    if (pointer_attribute(out[i], attributes[i], address) != CUDA_SUCCESS) put<int>(out[i], 0);
  }
  return CUDA_SUCCESS;
}
