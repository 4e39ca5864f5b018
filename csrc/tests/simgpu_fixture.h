// The simulated GPU as its own tests see it: the driver's functions by name, as an application
// finds them, and the control API. tools/native_tests.py names the folder of the libraries in
// TRAE_MEM_SIM_LIBRARIES; the tests are skipped where there is none.
//
// Types are declared here as cuda.h has them, so that the tests compile without a CUDA toolkit.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "simgpu/simgpu.h"
#include "test_support.h"

namespace simgpu_test {

using trae_mem::test::Gate;
using Pointer = unsigned long long;  // CUdeviceptr
using Stream = void*;
using Event = void*;

inline constexpr std::size_t kPage = std::size_t{2} << 20;

// CUresult
inline constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoContext = 201,
                     kInvalidHandle = 400, kNotReady = 600, kIllegalAddress = 700,
                     kAlreadyRegistered = 712, kNotRegistered = 713, kNotPermitted = 800,
                     kNotSupported = 801, kUnknown = 999;

struct Location {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int id = 0;
};
struct Properties {  // CUmemAllocationProp
  int type = 1;      // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = 0;
  Location location;
  void* windows = nullptr;
  unsigned char flags[8] = {};
};
struct Access {  // CUmemAccessDesc
  Location location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

// The driver's functions, with the names that cuda.h's macros give them.
struct Driver {
  int (*cuInit)(unsigned);
  int (*cuDeviceGetCount)(int*);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuDevicePrimaryCtxRelease_v2)(int);
  int (*cuCtxSetCurrent)(void*);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxPushCurrent_v2)(void*);
  int (*cuCtxPopCurrent_v2)(void**);
  int (*cuCtxGetDevice)(int*);
  int (*cuCtxSynchronize)();
  int (*cuMemGetInfo_v2)(std::size_t*, std::size_t*);
  int (*cuMemAddressReserve)(Pointer*, std::size_t, std::size_t, Pointer, unsigned long long);
  int (*cuMemAddressFree)(Pointer, std::size_t);
  int (*cuMemCreate)(unsigned long long*, std::size_t, const Properties*, unsigned long long);
  int (*cuMemRelease)(unsigned long long);
  int (*cuMemMap)(Pointer, std::size_t, std::size_t, unsigned long long, unsigned long long);
  int (*cuMemUnmap)(Pointer, std::size_t);
  int (*cuMemSetAccess)(Pointer, std::size_t, const Access*, std::size_t);
  int (*cuMemAlloc_v2)(Pointer*, std::size_t);
  int (*cuMemFree_v2)(Pointer);
  int (*cuMemHostAlloc)(void**, std::size_t, unsigned);
  int (*cuMemFreeHost)(void*);
  int (*cuMemHostRegister_v2)(void*, std::size_t, unsigned);
  int (*cuMemHostUnregister)(void*);
  int (*cuPointerGetAttribute)(void*, int, Pointer);
  int (*cuStreamCreateWithPriority)(Stream*, unsigned, int);
  int (*cuStreamDestroy_v2)(Stream);
  int (*cuStreamSynchronize)(Stream);
  int (*cuStreamQuery)(Stream);
  int (*cuStreamWaitEvent)(Stream, Event, unsigned);
  int (*cuStreamGetPriority)(Stream, int*);
  int (*cuEventCreate)(Event*, unsigned);
  int (*cuEventDestroy_v2)(Event);
  int (*cuEventRecord)(Event, Stream);
  int (*cuEventQuery)(Event);
  int (*cuEventSynchronize)(Event);
  int (*cuEventElapsedTime_v2)(float*, Event, Event);
  int (*cuMemcpyHtoDAsync_v2)(Pointer, const void*, std::size_t, Stream);
  int (*cuMemcpyDtoHAsync_v2)(void*, Pointer, std::size_t, Stream);
  int (*cuMemcpyDtoDAsync_v2)(Pointer, Pointer, std::size_t, Stream);
  int (*cuMemcpyDtoH_v2)(void*, Pointer, std::size_t);
  int (*cuMemsetD8Async)(Pointer, unsigned char, std::size_t, Stream);
  int (*cuLaunchHostFunc)(Stream, void (*)(void*), void*);
  int (*cuGetProcAddress_v2)(const char*, void**, int, std::uint64_t, int*);
  int (*cuGetErrorName)(int, const char**);
  int (*cuGraphCreate)(void**, unsigned);
};

struct Control {
  decltype(&::simgpu_mode) mode;
  decltype(&::simgpu_launch) launch;
  decltype(&::simgpu_work) work;
  decltype(&::simgpu_abort) abort;
  decltype(&::simgpu_calls) calls;
  decltype(&::simgpu_reset_calls) reset_calls;
  decltype(&::simgpu_fail) fail;
  decltype(&::simgpu_clear_faults) clear_faults;
  decltype(&::simgpu_set_adversary) set_adversary;
  decltype(&::simgpu_set_link) set_link;
  decltype(&::simgpu_set_memory) set_memory;
  decltype(&::simgpu_reports) reports;
  decltype(&::simgpu_clear_reports) clear_reports;
  decltype(&::simgpu_live) live;
  decltype(&::simgpu_used_bytes) used_bytes;
  decltype(&::simgpu_peak_bytes) peak_bytes;
  decltype(&::simgpu_reset_peak) reset_peak;
  decltype(&::simgpu_busy_seconds) busy_seconds;
};

// Both, once for the process; null where there is no simulator.
struct Simulator {
  Driver cu;
  Control sim;
  static const Simulator* find();
};

inline std::string text_of(std::size_t (*function)(char*, std::size_t)) {
  std::vector<char> buffer(function(nullptr, 0) + 4096);
  while (function(buffer.data(), buffer.size()) > buffer.size()) buffer.resize(2 * buffer.size());
  return buffer.data();
}

// One device in numeric mode with a current context, cleaned before and behind each test; a test
// that leaves something behind, or that reports what it did not expect, fails.
class SimulatedGpu : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  [[nodiscard]] const Driver& cu() const { return Simulator::find()->cu; }
  [[nodiscard]] const Control& sim() const { return Simulator::find()->sim; }
  [[nodiscard]] std::string reports() const { return text_of(sim().reports); }
  // Exactly one report since the last call, of that kind; returns the text.
  std::string expect_report(const std::string& kind);
  // What this program holds, as JSON; "": nothing.
  [[nodiscard]] std::string holdings() const;
  [[nodiscard]] int device_count() const;

  // Queues a host function that waits at the gate.
  void hold(const Gate& gate, Stream stream);
  void queue(std::function<void()> function, Stream stream);
  Stream make_stream(int priority = 0);
  Event make_event(unsigned flags = 2);  // CU_EVENT_DISABLE_TIMING
  // One page of memory at an address of its own, readable and writable.
  struct Page {
    Pointer address = 0;
    unsigned long long handle = 0;
  };
  Page make_page(int device = 0);
  void drop_page(const Page& page);
  void expect_bytes(Pointer address, std::size_t count, unsigned char value);

 private:
  std::vector<std::unique_ptr<std::function<void()>>> queued_;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
  bool ready_ = false;
};

// Host memory of whole pages that the system, not the driver, gave.
class HostPages {
 public:
  explicit HostPages(std::size_t bytes);
  ~HostPages() { drop(); }
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;
  void drop();  // munmap
  [[nodiscard]] unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace simgpu_test
