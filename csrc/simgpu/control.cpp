// The control API (simgpu.h).
#include <string>

#include "calls.h"
#include "configuration.h"
#include "device.h"
#include "json.h"
#include "live.h"
#include "memory.h"
#include "planned_faults.h"
#include "process.h"
#include "reports.h"
#include "settings.h"
#include "simgpu.h"
#include "streams.h"

using namespace simgpu;

namespace {

Handle handle_of(void* stream) { return reinterpret_cast<Handle>(stream); }

bool exists(int ordinal) { return ordinal >= 0 && ordinal < device_count(); }

}  // namespace

extern "C" {

int simgpu_mode(void) { return configuration().dry ? 1 : 0; }

int simgpu_launch(void* stream, const char* name, void (*run)(void*), void (*destroy)(void*),
                  void* data, const simgpu_range* ranges, size_t count) {
  // Destroyed in any case; moved on, so that its last reference goes on the stream's thread.
  std::shared_ptr<void> owned(data, [destroy](void* held) {
    if (destroy != nullptr) destroy(held);
  });
  static FunctionRecord& record = function("simgpu_launch");
  const Call call(record, Needs::kRuntimeContext, __builtin_return_address(0));
  if (call.refusal() != Code::kOk) return static_cast<int>(call.refusal());
  std::vector<Range> touched;
  touched.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (ranges[i].bytes == 0) continue;
    Range range = range_of(reinterpret_cast<std::uintptr_t>(ranges[i].address), ranges[i].bytes);
    // A kernel reaches pinned memory, but no other of the host's.
    if (range.place == Place::kPageable) range.place = Place::kDevice;
    touched.push_back(range);
  }
  return static_cast<int>(launch(handle_of(stream), name == nullptr ? "kernel" : name,
                                 std::move(owned), run, std::move(touched)));
}

int simgpu_work(void* stream, const char* name, double flops, double bytes) {
  static FunctionRecord& record = function("simgpu_work");
  const Call call(record, Needs::kRuntimeContext, __builtin_return_address(0));
  if (call.refusal() != Code::kOk) return static_cast<int>(call.refusal());
  return static_cast<int>(work(handle_of(stream), name, flops, bytes));
}

void simgpu_abort(void* stream, int code, const char* kind, const char* message) {
  const std::shared_ptr<Stream> found = find_stream(handle_of(stream));
  if (found == nullptr) return;
  report(kind, message);
  found->device().fail(static_cast<Code>(code));
}

size_t simgpu_calls(char* out, size_t size) { return hand_out(calls_as_json(), out, size); }

void simgpu_reset_calls(void) { reset_calls(); }

void simgpu_fail(const char* function, uint64_t nth, int code, int sticky, const char* caller) {
  plan_fault(function, nth, code, sticky != 0, caller == nullptr ? "" : caller);
}

void simgpu_clear_faults(void) {
  forget_planned_faults();
  for (Device* each : all_devices()) each->fail(Code::kOk);
}

void simgpu_set_adversary(uint64_t seed, uint64_t delay_us, int poison) {
  settings().seed = seed;
  settings().delay_us = delay_us;
  settings().poison = poison != 0;
}

void simgpu_set_link(double bytes_per_second) { settings().link = bytes_per_second; }

void simgpu_set_memory(int ordinal, uint64_t bytes) {
  if (exists(ordinal)) device(ordinal).memory().set_capacity(bytes);
}

size_t simgpu_reports(char* out, size_t size) { return hand_out(reports_as_json(), out, size); }

void simgpu_clear_reports(void) { clear_reports(); }

size_t simgpu_live(char* out, size_t size) { return hand_out(live_as_json(), out, size); }

uint64_t simgpu_used_bytes(int ordinal) {
  return exists(ordinal) ? device(ordinal).memory().used() : 0;
}

uint64_t simgpu_peak_bytes(int ordinal) {
  return exists(ordinal) ? device(ordinal).memory().peak() : 0;
}

void simgpu_reset_peak(int ordinal) {
  if (exists(ordinal)) device(ordinal).memory().reset_peak();
}

double simgpu_busy_seconds(int ordinal, int what) {
  if (!exists(ordinal)) return 0;
  switch (what) {
    case 0:
      return device(ordinal).kernel_seconds();
    case 1:
      return device(ordinal).to_device().busy_seconds();
    case 2:
      return device(ordinal).to_host().busy_seconds();
    default:
      return 0;
  }
}

}  // extern "C"
