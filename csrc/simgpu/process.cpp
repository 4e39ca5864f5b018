#include "process.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device.h"
#include "live.h"
#include "memory.h"
#include "reports.h"

namespace simgpu {
namespace {

std::atomic<bool> is_initialized = false;
std::atomic<bool> is_forked_child = false;  // of a process that had initialised the driver
std::atomic<bool> is_ending = false;
thread_local int host_functions = 0;             // depth
thread_local std::vector<int> current_contexts;  // a stack of devices, kNoDevice: none

void note_fork() { is_forked_child = true; }

// Runs before the libraries that were loaded earlier destroy their own state, which work that is
// still queued would use.
void end() {
  if (is_forked_child) return;
  print_summary();
  is_ending = true;
  for (Device* each : all_devices()) each->fail(Code::kDeinitialized);
  wait_until_nothing_runs();
}

bool watch_process() {
  pthread_atfork(nullptr, nullptr, note_fork);
  std::atexit(end);
  return true;
}

}  // namespace

Code initialize() {
  if (device_count() == 0) return Code::kNoDevice;
  static const bool watched = watch_process();
  is_initialized = watched;
  return Code::kOk;
}

bool initialized() { return is_initialized; }

bool in_forked_child() { return is_forked_child; }

Code process_refusal() {
  if (is_ending) return Code::kDeinitialized;
  if (host_functions > 0) {
    report(kind::kCallInHostFunction,
           "a host function called the API, which may deadlock on a GPU; the call returns "
           "\"operation not permitted\" (800).");
    return Code::kNotPermitted;
  }
  return Code::kOk;
}

int device_count() { return static_cast<int>(all_devices().size()); }

int current_device() { return current_contexts.empty() ? kNoDevice : current_contexts.back(); }

void set_current_device(int device) {
  if (current_contexts.empty()) {
    current_contexts.push_back(device);
  } else {
    current_contexts.back() = device;
  }
}

void push_device(int device) { current_contexts.push_back(device); }

Code pop_device(int* device) {
  if (current_contexts.empty()) return Code::kInvalidContext;
  if (device != nullptr) *device = current_contexts.back();
  current_contexts.pop_back();
  return Code::kOk;
}

Code retain_primary(int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return Code::kInvalidDevice;
  ++device(ordinal).retained;
  return Code::kOk;
}

Code release_primary(int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return Code::kInvalidDevice;
  std::atomic<int>& retained = device(ordinal).retained;
  if (retained == 0) return Code::kInvalidContext;
  --retained;
  return Code::kOk;
}

bool primary_is_active(int ordinal) { return device(ordinal).retained > 0; }

Code enter_runtime_context() {
  if (const Code code = initialize(); code != Code::kOk) return code;
  if (current_device() == kNoDevice) set_current_device(0);
  // The runtime retains a device's primary context once, and for good.
  Device& current = device(current_device());
  if (!current.retained_by_runtime.exchange(true)) ++current.retained;
  return Code::kOk;
}

Code context_refusal() {
  if (current_device() == kNoDevice) return Code::kInvalidContext;
  Device& current = device(current_device());
  if (current.failure() != Code::kOk) return current.failure();
  return current.retained > 0 ? Code::kOk : Code::kInvalidContext;
}

void fail_current_context(Code code, const std::string& why) {
  const int ordinal = current_device() == kNoDevice ? 0 : current_device();
  if (ordinal < device_count()) device(ordinal).fail(code);
  std::fprintf(stderr, "simulated GPU: the context of device %d fails from now on with %d: %s\n",
               ordinal, static_cast<int>(code), why.c_str());
}

InHostFunction::InHostFunction() { ++host_functions; }
InHostFunction::~InHostFunction() { --host_functions; }

}  // namespace simgpu
