// libcudart.so: device and host memory, what pointers are.
#include "memory.h"
#include "runtime.h"

using simgpu::Code;

SIMGPU_EXPORT cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  SIMGPU_ENTER("cudaMemGetInfo", kRuntimeContext);
  return result(simgpu::memory_info(free, total));
}

SIMGPU_EXPORT cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  SIMGPU_ENTER("cudaMalloc", kRuntimeContext);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  std::uintptr_t made = 0;
  const Code code = simgpu::allocate(&made, bytes);
  if (code == Code::kOk) *pointer = reinterpret_cast<void*>(made);
  return result(code);
}

SIMGPU_EXPORT cudaError_t cudaFree(void* pointer) {
  SIMGPU_ENTER("cudaFree", kRuntimeContext);
  return result(simgpu::free_allocation(address_of(pointer)));
}

namespace {

cudaError_t allocate_host(void** pointer, std::size_t bytes, unsigned flags) {
  std::uintptr_t made = 0;
  const Code code = simgpu::allocate_host(&made, bytes, flags);
  if (code == Code::kOk) *pointer = reinterpret_cast<void*>(made);
  return result(code);
}

}  // namespace

SIMGPU_EXPORT cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned int flags) {
  SIMGPU_ENTER("cudaHostAlloc", kRuntimeContext);
  return allocate_host(pointer, bytes, flags);
}

SIMGPU_EXPORT cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  SIMGPU_ENTER("cudaMallocHost", kRuntimeContext);
  return allocate_host(pointer, bytes, 0);
}

SIMGPU_EXPORT cudaError_t cudaFreeHost(void* pointer) {
  SIMGPU_ENTER("cudaFreeHost", kRuntimeContext);
  return result(simgpu::free_host(address_of(pointer)));
}

SIMGPU_EXPORT cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned int flags) {
  SIMGPU_ENTER("cudaHostRegister", kRuntimeContext);
  return result(simgpu::register_host(address_of(pointer), bytes, flags));
}

SIMGPU_EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  SIMGPU_ENTER("cudaHostUnregister", kRuntimeContext);
  return result(simgpu::unregister_host(address_of(pointer)));
}

SIMGPU_EXPORT cudaError_t cudaHostGetDevicePointer(void** out, void* pointer, unsigned int) {
  SIMGPU_ENTER("cudaHostGetDevicePointer", kRuntimeContext);
  const bool pinned = simgpu::facts_of(address_of(pointer)).place == simgpu::Place::kPinned;
  if (pinned) *out = pointer;
  return result(pinned ? Code::kOk : Code::kInvalidValue);
}

SIMGPU_EXPORT cudaError_t cudaHostGetFlags(unsigned int* flags, void* pointer) {
  SIMGPU_ENTER("cudaHostGetFlags", kRuntimeContext);
  const simgpu::AddressFacts facts = simgpu::facts_of(address_of(pointer));
  *flags = facts.flags;
  return result(facts.place == simgpu::Place::kPinned ? Code::kOk : Code::kInvalidValue);
}

SIMGPU_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out,
                                                   const void* pointer) {
  SIMGPU_ENTER("cudaPointerGetAttributes", kRuntime);
  const simgpu::AddressFacts facts = simgpu::facts_of(address_of(pointer));
  *out = {};
  switch (facts.place) {
    case simgpu::Place::kDevice:
      out->type = facts.mapped ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
      out->device = facts.device;
      out->devicePointer = const_cast<void*>(pointer);
      break;
    case simgpu::Place::kPinned:
      out->type = cudaMemoryTypeHost;
      out->devicePointer = const_cast<void*>(pointer);
      out->hostPointer = const_cast<void*>(pointer);
      break;
    case simgpu::Place::kPageable:
      out->type = cudaMemoryTypeUnregistered;
      out->device = -2;  // cudaInvalidDeviceId
      out->hostPointer = const_cast<void*>(pointer);
      break;
  }
  return cudaSuccess;
}

// --- copies and fills ---------------------------------------------------------------------------

namespace {

constexpr bool kBlocking = true;
constexpr bool kAsync = false;

// Where the bytes are is known from the addresses (unified addressing), whatever the kind says.
cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream,
                 bool blocking) {
  return result(simgpu::copy(address_of(to), address_of(from), bytes, handle_of(stream), blocking));
}

cudaError_t copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                      std::size_t width, std::size_t rows, cudaStream_t stream, bool blocking) {
  if (width > to_pitch || width > from_pitch) return result(Code::kInvalidValue);
  return result(simgpu::copy_rows({address_of(to), to_pitch}, {address_of(from), from_pitch}, width,
                                  rows, handle_of(stream), blocking));
}

}  // namespace

SIMGPU_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                                     cudaMemcpyKind) {
  SIMGPU_ENTER("cudaMemcpy", kRuntimeContext);
  return copy(to, from, bytes, nullptr, kBlocking);
}

SIMGPU_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                          cudaMemcpyKind, cudaStream_t stream) {
  SIMGPU_ENTER("cudaMemcpyAsync", kRuntimeContext);
  return copy(to, from, bytes, stream, kAsync);
}

SIMGPU_EXPORT cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, std::size_t bytes) {
  SIMGPU_ENTER("cudaMemcpyPeer", kRuntimeContext);
  return copy(to, from, bytes, nullptr, kBlocking);
}

SIMGPU_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                              std::size_t bytes, cudaStream_t stream) {
  SIMGPU_ENTER("cudaMemcpyPeerAsync", kRuntimeContext);
  return copy(to, from, bytes, stream, kAsync);
}

SIMGPU_EXPORT cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from,
                                       std::size_t from_pitch, std::size_t width, std::size_t rows,
                                       cudaMemcpyKind) {
  SIMGPU_ENTER("cudaMemcpy2D", kRuntimeContext);
  return copy_rows(to, to_pitch, from, from_pitch, width, rows, nullptr, kBlocking);
}

SIMGPU_EXPORT cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                            std::size_t from_pitch, std::size_t width,
                                            std::size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  SIMGPU_ENTER("cudaMemcpy2DAsync", kRuntimeContext);
  return copy_rows(to, to_pitch, from, from_pitch, width, rows, stream, kAsync);
}

SIMGPU_EXPORT cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  SIMGPU_ENTER("cudaMemset", kRuntimeContext);
  return result(simgpu::fill(address_of(to), static_cast<std::uint8_t>(value), 1, bytes, 0));
}

SIMGPU_EXPORT cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes,
                                          cudaStream_t stream) {
  SIMGPU_ENTER("cudaMemsetAsync", kRuntimeContext);
  return result(
      simgpu::fill(address_of(to), static_cast<std::uint8_t>(value), 1, bytes, handle_of(stream)));
}
