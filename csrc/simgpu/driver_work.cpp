// libcuda.so.1: streams, events, and work on streams.
#include "driver.h"
#include "memory.h"

using simgpu::Code;

// --- streams ------------------------------------------------------------------------------------

SIMGPU_EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags,
                                                  int priority) {
  SIMGPU_ENTER("cuStreamCreateWithPriority", kContext);
  simgpu::Handle made = 0;
  const Code code = simgpu::create_stream(&made, priority, flags);
  *stream = reinterpret_cast<CUstream>(made);
  return result(code);
}

SIMGPU_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  SIMGPU_ENTER("cuStreamCreate", kContext);
  simgpu::Handle made = 0;
  const Code code = simgpu::create_stream(&made, simgpu::kLowestPriority, flags);
  *stream = reinterpret_cast<CUstream>(made);
  return result(code);
}

SIMGPU_EXPORT CUresult cuStreamDestroy(CUstream stream) {
  SIMGPU_ENTER("cuStreamDestroy", kContext);
  return result(simgpu::destroy_stream(handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  SIMGPU_ENTER("cuStreamSynchronize", kContext);
  return result(simgpu::synchronize_stream(handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuStreamQuery(CUstream stream) {
  SIMGPU_ENTER("cuStreamQuery", kContext);
  return result(simgpu::query_stream(handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  SIMGPU_ENTER("cuStreamWaitEvent", kContext);
  return result(simgpu::wait_event(handle_of(stream), handle_of(event)));
}

SIMGPU_EXPORT CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  SIMGPU_ENTER("cuStreamGetPriority", kContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *priority = facts.priority;
  return result(code);
}

SIMGPU_EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned int* flags) {
  SIMGPU_ENTER("cuStreamGetFlags", kContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *flags = facts.flags;
  return result(code);
}

SIMGPU_EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  SIMGPU_ENTER("cuStreamGetId", kContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *id = facts.id;
  return result(code);
}

SIMGPU_EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  SIMGPU_ENTER("cuStreamGetCtx", kContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *context = context_of(facts.device);
  return result(code);
}

SIMGPU_EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  SIMGPU_ENTER("cuStreamIsCapturing", kContext);
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) {
  SIMGPU_ENTER("cuThreadExchangeStreamCaptureMode", kDriver);
  return CUDA_SUCCESS;
}

// --- events -------------------------------------------------------------------------------------

SIMGPU_EXPORT CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  SIMGPU_ENTER("cuEventCreate", kContext);
  simgpu::Handle made = 0;
  const bool timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  const Code code = simgpu::create_event(&made, timed);
  *event = reinterpret_cast<CUevent>(made);
  return result(code);
}

SIMGPU_EXPORT CUresult cuEventDestroy(CUevent event) {
  SIMGPU_ENTER("cuEventDestroy", kContext);
  return result(simgpu::destroy_event(handle_of(event)));
}

SIMGPU_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  SIMGPU_ENTER("cuEventRecord", kContext);
  return result(simgpu::record_event(handle_of(event), handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int) {
  SIMGPU_ENTER("cuEventRecordWithFlags", kContext);
  return result(simgpu::record_event(handle_of(event), handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuEventQuery(CUevent event) {
  SIMGPU_ENTER("cuEventQuery", kContext);
  return result(simgpu::query_event(handle_of(event)));
}

SIMGPU_EXPORT CUresult cuEventSynchronize(CUevent event) {
  SIMGPU_ENTER("cuEventSynchronize", kContext);
  return result(simgpu::synchronize_event(handle_of(event)));
}

SIMGPU_EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  SIMGPU_ENTER("cuEventElapsedTime", kContext);
  return result(simgpu::elapsed_ms(milliseconds, handle_of(from), handle_of(to)));
}

// --- copies -------------------------------------------------------------------------------------

namespace {

std::uintptr_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

constexpr bool kBlocking = true;
constexpr bool kAsync = false;

CUresult copy(std::uintptr_t to, std::uintptr_t from, size_t bytes, CUstream stream,
              bool blocking) {
  return result(simgpu::copy(to, from, bytes, handle_of(stream), blocking));
}

}  // namespace

SIMGPU_EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  SIMGPU_ENTER("cuMemcpy", kContext);
  return copy(to, from, bytes, nullptr, kBlocking);
}

SIMGPU_EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  SIMGPU_ENTER("cuMemcpyHtoD", kContext);
  return copy(to, address_of(from), bytes, nullptr, kBlocking);
}

SIMGPU_EXPORT CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  SIMGPU_ENTER("cuMemcpyDtoH", kContext);
  return copy(address_of(to), from, bytes, nullptr, kBlocking);
}

SIMGPU_EXPORT CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  SIMGPU_ENTER("cuMemcpyDtoD", kContext);
  return copy(to, from, bytes, nullptr, kAsync);
}

SIMGPU_EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                     CUstream stream) {
  SIMGPU_ENTER("cuMemcpyAsync", kContext);
  return copy(to, from, bytes, stream, kAsync);
}

SIMGPU_EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes,
                                         CUstream stream) {
  SIMGPU_ENTER("cuMemcpyHtoDAsync", kContext);
  return copy(to, address_of(from), bytes, stream, kAsync);
}

SIMGPU_EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes,
                                         CUstream stream) {
  SIMGPU_ENTER("cuMemcpyDtoHAsync", kContext);
  return copy(address_of(to), from, bytes, stream, kAsync);
}

SIMGPU_EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                         CUstream stream) {
  SIMGPU_ENTER("cuMemcpyDtoDAsync", kContext);
  return copy(to, from, bytes, stream, kAsync);
}

SIMGPU_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext,
                                         size_t bytes, CUstream stream) {
  SIMGPU_ENTER("cuMemcpyPeerAsync", kContext);
  return copy(to, from, bytes, stream, kAsync);
}

// --- fills --------------------------------------------------------------------------------------

SIMGPU_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                       CUstream stream) {
  SIMGPU_ENTER("cuMemsetD8Async", kContext);
  return result(simgpu::fill(to, value, 1, count, handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count,
                                        CUstream stream) {
  SIMGPU_ENTER("cuMemsetD16Async", kContext);
  return result(simgpu::fill(to, value, 2, count, handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count,
                                        CUstream stream) {
  SIMGPU_ENTER("cuMemsetD32Async", kContext);
  return result(simgpu::fill(to, value, 4, count, handle_of(stream)));
}

SIMGPU_EXPORT CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  SIMGPU_ENTER("cuMemsetD8", kContext);
  return result(simgpu::fill(to, value, 1, count, 0));
}

SIMGPU_EXPORT CUresult cuMemsetD32(CUdeviceptr to, unsigned int value, size_t count) {
  SIMGPU_ENTER("cuMemsetD32", kContext);
  return result(simgpu::fill(to, value, 4, count, 0));
}

// --- host functions and kernels -----------------------------------------------------------------

SIMGPU_EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  SIMGPU_ENTER("cuLaunchHostFunc", kContext);
  return result(
      simgpu::run_on_host([function, data](Code) { function(data); }, handle_of(stream), false));
}

SIMGPU_EXPORT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* data,
                                           unsigned int) {
  SIMGPU_ENTER("cuStreamAddCallback", kContext);
  return result(simgpu::run_on_host(
      [callback, stream, data](Code code) { callback(stream, result(code), data); },
      handle_of(stream), true));
}

SIMGPU_EXPORT CUresult cuLaunchKernel(CUfunction, unsigned int, unsigned int, unsigned int,
                                      unsigned int, unsigned int, unsigned int, unsigned int,
                                      CUstream stream, void**, void**) {
  SIMGPU_ENTER("cuLaunchKernel", kContext);
  return result(simgpu::launch_opaque_kernel("a kernel of a loaded module", handle_of(stream)));
}
