// libcudart.so: streams, events, host functions, and what stream capture asks when there is none.
#include "runtime.h"

using simgpu::Code;

namespace {

cudaError_t make_stream(cudaStream_t* stream, int priority, unsigned flags) {
  simgpu::Handle made = 0;
  const Code code = simgpu::create_stream(&made, priority, flags);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return result(code);
}

cudaError_t make_event(cudaEvent_t* event, unsigned flags) {
  simgpu::Handle made = 0;
  const Code code = simgpu::create_event(&made, (flags & cudaEventDisableTiming) == 0);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return result(code);
}

}  // namespace

SIMGPU_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  SIMGPU_ENTER("cudaStreamCreate", kRuntimeContext);
  return make_stream(stream, simgpu::kLowestPriority, cudaStreamDefault);
}

SIMGPU_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  SIMGPU_ENTER("cudaStreamCreateWithFlags", kRuntimeContext);
  return make_stream(stream, simgpu::kLowestPriority, flags);
}

SIMGPU_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags,
                                                       int priority) {
  SIMGPU_ENTER("cudaStreamCreateWithPriority", kRuntimeContext);
  return make_stream(stream, priority, flags);
}

SIMGPU_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  SIMGPU_ENTER("cudaStreamDestroy", kRuntimeContext);
  return result(simgpu::destroy_stream(handle_of(stream)));
}

SIMGPU_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  SIMGPU_ENTER("cudaStreamSynchronize", kRuntimeContext);
  return result(simgpu::synchronize_stream(handle_of(stream)));
}

SIMGPU_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  SIMGPU_ENTER("cudaStreamQuery", kRuntimeContext);
  return result(simgpu::query_stream(handle_of(stream)));
}

SIMGPU_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                              unsigned int) {
  SIMGPU_ENTER("cudaStreamWaitEvent", kRuntimeContext);
  return result(simgpu::wait_event(handle_of(stream), handle_of(event)));
}

SIMGPU_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  SIMGPU_ENTER("cudaStreamGetPriority", kRuntimeContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *priority = facts.priority;
  return result(code);
}

SIMGPU_EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int* flags) {
  SIMGPU_ENTER("cudaStreamGetFlags", kRuntimeContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *flags = facts.flags;
  return result(code);
}

SIMGPU_EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  SIMGPU_ENTER("cudaStreamGetId", kRuntimeContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *id = facts.id;
  return result(code);
}

SIMGPU_EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  SIMGPU_ENTER("cudaStreamGetDevice", kRuntimeContext);
  simgpu::StreamFacts facts{};
  const Code code = simgpu::stream_facts(&facts, handle_of(stream));
  *device = facts.device;
  return result(code);
}

SIMGPU_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                                             void* data) {
  SIMGPU_ENTER("cudaLaunchHostFunc", kRuntimeContext);
  return result(
      simgpu::run_on_host([function, data](Code) { function(data); }, handle_of(stream), false));
}

SIMGPU_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback,
                                                void* data, unsigned int) {
  SIMGPU_ENTER("cudaStreamAddCallback", kRuntimeContext);
  return result(simgpu::run_on_host(
      [callback, stream, data](Code code) {
        callback(stream, static_cast<cudaError_t>(code), data);
      },
      handle_of(stream), true));
}

// --- capture: never under way -------------------------------------------------------------------

SIMGPU_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  SIMGPU_ENTER("cudaStreamIsCapturing", kRuntimeContext);
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

namespace {

cudaError_t no_capture(cudaStreamCaptureStatus* status, unsigned long long* id) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}

}  // namespace

#if CUDART_VERSION >= 13000
SIMGPU_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                                   unsigned long long* id, cudaGraph_t*,
                                                   const cudaGraphNode_t**,
                                                   const cudaGraphEdgeData**, std::size_t*) {
  SIMGPU_ENTER("cudaStreamGetCaptureInfo", kRuntimeContext);
  return no_capture(status, id);
}
#else
// The header maps the plain name to the second version.
SIMGPU_EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status,
                                                      unsigned long long* id, cudaGraph_t*,
                                                      const cudaGraphNode_t**, std::size_t*) {
  SIMGPU_ENTER("cudaStreamGetCaptureInfo", kRuntimeContext);
  return no_capture(status, id);
}

#if CUDART_VERSION >= 12030
SIMGPU_EXPORT cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t, cudaStreamCaptureStatus* status,
                                                      unsigned long long* id, cudaGraph_t*,
                                                      const cudaGraphNode_t**,
                                                      const cudaGraphEdgeData**, std::size_t*) {
  SIMGPU_ENTER("cudaStreamGetCaptureInfo", kRuntimeContext);
  return no_capture(status, id);
}
#endif
#endif

SIMGPU_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  SIMGPU_ENTER("cudaThreadExchangeStreamCaptureMode", kRuntime);
  return cudaSuccess;
}

// --- events -------------------------------------------------------------------------------------

SIMGPU_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  SIMGPU_ENTER("cudaEventCreate", kRuntimeContext);
  return make_event(event, cudaEventDefault);
}

SIMGPU_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  SIMGPU_ENTER("cudaEventCreateWithFlags", kRuntimeContext);
  return make_event(event, flags);
}

SIMGPU_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  SIMGPU_ENTER("cudaEventDestroy", kRuntimeContext);
  return result(simgpu::destroy_event(handle_of(event)));
}

SIMGPU_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  SIMGPU_ENTER("cudaEventRecord", kRuntimeContext);
  return result(simgpu::record_event(handle_of(event), handle_of(stream)));
}

SIMGPU_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                                   unsigned int) {
  SIMGPU_ENTER("cudaEventRecordWithFlags", kRuntimeContext);
  return result(simgpu::record_event(handle_of(event), handle_of(stream)));
}

SIMGPU_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  SIMGPU_ENTER("cudaEventQuery", kRuntimeContext);
  return result(simgpu::query_event(handle_of(event)));
}

SIMGPU_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  SIMGPU_ENTER("cudaEventSynchronize", kRuntimeContext);
  return result(simgpu::synchronize_event(handle_of(event)));
}

SIMGPU_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from,
                                               cudaEvent_t to) {
  SIMGPU_ENTER("cudaEventElapsedTime", kRuntimeContext);
  return result(simgpu::elapsed_ms(milliseconds, handle_of(from), handle_of(to)));
}
