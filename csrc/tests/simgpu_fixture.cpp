#include "simgpu_fixture.h"

#include <sys/mman.h>

namespace simgpu_test {
namespace {

class Library {
 public:
  explicit Library(const std::string& path)
      : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }
  template <typename Function>
  void find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (function == nullptr) throw std::runtime_error(std::string("no function ") + name);
  }

 private:
  void* handle_;  // never closed: its threads run as long as the process
};

Driver load_driver(const Library& library) {
  Driver cu{};
#define FIND(name) library.find(cu.name, #name)
  FIND(cuInit);
  FIND(cuDeviceGetCount);
  FIND(cuDevicePrimaryCtxRetain);
  FIND(cuDevicePrimaryCtxRelease_v2);
  FIND(cuCtxSetCurrent);
  FIND(cuCtxGetCurrent);
  FIND(cuCtxPushCurrent_v2);
  FIND(cuCtxPopCurrent_v2);
  FIND(cuCtxGetDevice);
  FIND(cuCtxSynchronize);
  FIND(cuMemGetInfo_v2);
  FIND(cuMemAddressReserve);
  FIND(cuMemAddressFree);
  FIND(cuMemCreate);
  FIND(cuMemRelease);
  FIND(cuMemMap);
  FIND(cuMemUnmap);
  FIND(cuMemSetAccess);
  FIND(cuMemAlloc_v2);
  FIND(cuMemFree_v2);
  FIND(cuMemHostAlloc);
  FIND(cuMemFreeHost);
  FIND(cuMemHostRegister_v2);
  FIND(cuMemHostUnregister);
  FIND(cuPointerGetAttribute);
  FIND(cuStreamCreateWithPriority);
  FIND(cuStreamDestroy_v2);
  FIND(cuStreamSynchronize);
  FIND(cuStreamQuery);
  FIND(cuStreamWaitEvent);
  FIND(cuStreamGetPriority);
  FIND(cuEventCreate);
  FIND(cuEventDestroy_v2);
  FIND(cuEventRecord);
  FIND(cuEventQuery);
  FIND(cuEventSynchronize);
  FIND(cuMemcpyHtoDAsync_v2);
  FIND(cuMemcpyDtoHAsync_v2);
  FIND(cuMemcpyDtoDAsync_v2);
  FIND(cuMemcpyDtoH_v2);
  FIND(cuMemsetD8Async);
  FIND(cuLaunchHostFunc);
  FIND(cuGetProcAddress_v2);
  FIND(cuGetErrorName);
  FIND(cuGraphCreate);
#undef FIND
  // Its version differs between CUDA 12 and 13: found as an application finds it.
  void* elapsed = nullptr;
  if (cu.cuGetProcAddress_v2("cuEventElapsedTime", &elapsed, 12000, 0, nullptr) != 0) {
    throw std::runtime_error("no function cuEventElapsedTime");
  }
  cu.cuEventElapsedTime_v2 = reinterpret_cast<decltype(cu.cuEventElapsedTime_v2)>(elapsed);
  return cu;
}

Control load_control(const Library& library) {
  Control sim{};
#define FIND(name) library.find(sim.name, "simgpu_" #name)
  FIND(mode);
  FIND(launch);
  FIND(work);
  FIND(abort);
  FIND(calls);
  FIND(reset_calls);
  FIND(fail);
  FIND(clear_faults);
  FIND(set_adversary);
  FIND(set_link);
  FIND(set_memory);
  FIND(reports);
  FIND(clear_reports);
  FIND(live);
  FIND(used_bytes);
  FIND(peak_bytes);
  FIND(reset_peak);
  FIND(busy_seconds);
#undef FIND
  return sim;
}

const Simulator* load() {
  const char* const folder = std::getenv("TRAE_MEM_SIM_LIBRARIES");
  if (folder == nullptr) return nullptr;
  const Library core(std::string(folder) + "/libsimgpu.so");
  const Library driver(std::string(folder) + "/libcuda.so.1");
  static const Simulator loaded{load_driver(driver), load_control(core)};
  return &loaded;
}

}  // namespace

const Simulator* Simulator::find() {
  static const Simulator* const found = load();
  return found;
}

void SimulatedGpu::SetUp() {
  if (Simulator::find() == nullptr) {
    const char* const reason = std::getenv("TRAE_MEM_SIM_MISSING");
    GTEST_SKIP() << (reason != nullptr ? reason : "TRAE_MEM_SIM_LIBRARIES is not set");
  }
  ready_ = true;
  sim().clear_faults();
  sim().clear_reports();
  sim().set_adversary(0, 0, 0);
  ASSERT_EQ(cu().cuInit(0), 0);
  void* context = nullptr;
  ASSERT_EQ(cu().cuDevicePrimaryCtxRetain(&context, 0), 0);
  ASSERT_EQ(cu().cuCtxSetCurrent(context), 0);
}

void SimulatedGpu::TearDown() {
  if (!ready_) return;
  sim().clear_faults();
  for (Stream stream : streams_) {
    EXPECT_EQ(cu().cuStreamSynchronize(stream), 0);
    EXPECT_EQ(cu().cuStreamDestroy_v2(stream), 0);
  }
  for (Event event : events_) EXPECT_EQ(cu().cuEventDestroy_v2(event), 0);
  EXPECT_EQ(cu().cuCtxSynchronize(), 0);
  EXPECT_EQ(reports(), "[]");
  EXPECT_EQ(holdings(), "");
  EXPECT_EQ(cu().cuCtxSetCurrent(nullptr), 0);
  EXPECT_EQ(cu().cuDevicePrimaryCtxRelease_v2(0), 0);
  sim().clear_reports();
}

std::string SimulatedGpu::expect_report(const std::string& kind) {
  std::string text = reports();
  sim().clear_reports();
  const std::string wanted = "\"kind\": ";
  EXPECT_NE(text.find(wanted + "\"" + kind + "\""), std::string::npos) << text;
  EXPECT_EQ(text.find(wanted), text.rfind(wanted)) << "more than one report: " << text;
  return text;
}

std::string SimulatedGpu::holdings() const {
  const std::string all = text_of(sim().live);
  const std::size_t ours = all.find("native_tests");
  return ours == std::string::npos ? "" : all.substr(ours, all.find('}', ours) - ours);
}

int SimulatedGpu::device_count() const {
  int count = 0;
  EXPECT_EQ(cu().cuDeviceGetCount(&count), 0);
  return count;
}

void SimulatedGpu::queue(std::function<void()> function, Stream stream) {
  queued_.push_back(std::make_unique<std::function<void()>>(std::move(function)));
  const auto call = [](void* data) { (*static_cast<std::function<void()>*>(data))(); };
  ASSERT_EQ(cu().cuLaunchHostFunc(stream, call, queued_.back().get()), 0);
}

void SimulatedGpu::hold(const Gate& gate, Stream stream) { queue(gate.task(), stream); }

Stream SimulatedGpu::make_stream(int priority) {
  Stream stream = nullptr;
  EXPECT_EQ(cu().cuStreamCreateWithPriority(&stream, 1, priority), 0);
  streams_.push_back(stream);
  return stream;
}

Event SimulatedGpu::make_event(unsigned flags) {
  Event event = nullptr;
  EXPECT_EQ(cu().cuEventCreate(&event, flags), 0);
  events_.push_back(event);
  return event;
}

SimulatedGpu::Page SimulatedGpu::make_page(int device) {
  Page page;
  Properties properties;
  properties.location.id = device;
  Access access;
  access.location.id = device;
  EXPECT_EQ(cu().cuMemAddressReserve(&page.address, kPage, 0, 0, 0), 0);
  EXPECT_EQ(cu().cuMemCreate(&page.handle, kPage, &properties, 0), 0);
  EXPECT_EQ(cu().cuMemMap(page.address, kPage, 0, page.handle, 0), 0);
  EXPECT_EQ(cu().cuMemSetAccess(page.address, kPage, &access, 1), 0);
  return page;
}

void SimulatedGpu::drop_page(const Page& page) {
  EXPECT_EQ(cu().cuMemUnmap(page.address, kPage), 0);
  EXPECT_EQ(cu().cuMemRelease(page.handle), 0);
  EXPECT_EQ(cu().cuMemAddressFree(page.address, kPage), 0);
}

void SimulatedGpu::expect_bytes(Pointer address, std::size_t count, unsigned char value) {
  std::vector<unsigned char> bytes(count);
  ASSERT_EQ(cu().cuMemcpyDtoH_v2(bytes.data(), address, count), 0);
  EXPECT_EQ(bytes, std::vector<unsigned char>(count, value));
}

// So low that no other mapping takes the place of one that was dropped.
constexpr std::uintptr_t kFarFromOthers = 0x2000'0000;

HostPages::HostPages(std::size_t bytes)
    : data_(mmap(reinterpret_cast<void*>(kFarFromOthers), bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
      bytes_(bytes) {
  if (data_ == MAP_FAILED) throw std::runtime_error("mmap failed");
}

void HostPages::drop() {
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = nullptr;
}

}  // namespace simgpu_test
