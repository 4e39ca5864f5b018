#include "cuda_context.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <utility>

#include "device.h"
#include "error.h"
#include "options.h"

namespace trae_mem {
namespace {

constexpr const char* kUseCpu = "or use device=\"cpu\"";
constexpr const char* kForked =
    "this process was forked from one that had used CUDA, and CUDA does not work in such a child. "
    "Start it with the 'spawn' method (multiprocessing.set_start_method(\"spawn\")), or use "
    "device=\"cpu\" in it";

// How many forks lie between the first process and this one, counted where a GPU was opened.
std::atomic<unsigned> fork_generation = 0;

unsigned current_generation() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { ++fork_generation; });
  return fork_generation;
}

// What CUDA_VISIBLE_DEVICES has to do with a GPU that is not seen; empty: nothing.
std::string hidden_devices() {
  const std::optional<std::string> visible = foreign_variable("CUDA_VISIBLE_DEVICES");
  return visible.has_value() ? " CUDA_VISIBLE_DEVICES='" + *visible + "' hides others." : "";
}

// Why cuInit failed and what to do.
std::string cannot_start(const CudaDriver& driver, cuda::Result error) {
  const std::string what =
      "The NVIDIA driver does not start: cuInit: " + driver.describe(error) + ". ";
  switch (error) {
    case cuda::kNoDevice:
      return "No NVIDIA GPU is visible: " + driver.describe(error) + "." +
             (hidden_devices().empty() ? " In a container, start it with --gpus all, "
                                       : hidden_devices() + " Unset it, ") +
             kUseCpu;
    case cuda::kNotInitialized:
      return what + "Most likely " + kForked;
    case cuda::kStubLibrary:
      return what +
             "The toolkit's stub was found in place of the driver: take the folder 'stubs' "
             "out of LD_LIBRARY_PATH, " +
             kUseCpu;
    case cuda::kSystemDriverMismatch:
      return what +
             "The kernel's module is of another version than libcuda.so.1: reboot after a "
             "driver's update (in a container: match the host's driver), " +
             kUseCpu;
    case cuda::kUnknown:
      return what +
             "Often the kernel's module nvidia-uvm is not loaded: run nvidia-smi as root "
             "once, or modprobe nvidia-uvm, " +
             kUseCpu;
    default:
      return what + "See what nvidia-smi says, " + kUseCpu;
  }
}

}  // namespace

CudaContext::CudaContext(std::shared_ptr<const CudaDriver> driver, int index)
    : driver_(std::move(driver)), index_(index), fork_generation_(current_generation()) {
  open();
  try {
    require_pages();
  } catch (...) {
    driver_->cuDevicePrimaryCtxRelease(number_);
    throw;
  }
}

void CudaContext::require_pages() const {
  const Guard guard(*this);
  std::size_t granularity = 0;
  const cuda::AllocationProperties properties{.location = {.id = number_}};
  check(driver_->cuMemGetAllocationGranularity(&granularity, &properties, 0), "open",
        "cuMemGetAllocationGranularity");
  if (granularity == 0 || kPageBytes % granularity != 0) {
    throw DeviceUnavailable("GPU " + std::to_string(index_) + " (" + name_ + ") has pages of " +
                            format_bytes(granularity) +
                            ", and this version needs pages that divide " +
                            format_bytes(kPageBytes) + ". Use device=\"cpu\"");
  }
}

void CudaContext::open() {
  if (const auto error = driver_->cuInit(0)) throw DeviceUnavailable(cannot_start(*driver_, error));
  const std::string gpu = "GPU " + std::to_string(index_);
  const auto require = [&](cuda::Result error, const char* function) {
    if (error == cuda::kSuccess) return;
    throw DeviceUnavailable(gpu + ": " + function + ": " + driver_->describe(error) +
                            ". See what nvidia-smi says, " + kUseCpu);
  };
  int count = 0;
  require(driver_->cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (count == 0) throw DeviceUnavailable(cannot_start(*driver_, cuda::kNoDevice));
  if (index_ < 0 || index_ >= count) {
    throw DeviceUnavailable(gpu + " does not exist: " + std::to_string(count) +
                            (count == 1 ? " GPU is" : " GPUs are") + " visible." +
                            hidden_devices() + " Use device=\"cuda:0\", " + kUseCpu);
  }
  require(driver_->cuDeviceGet(&number_, index_), "cuDeviceGet");
  std::array<char, 256> name{};
  require(driver_->cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, number_),
          "cuDeviceGetName");
  name_ = name.data();
  int supported = 0;
  require(
      driver_->cuDeviceGetAttribute(&supported, cuda::kVirtualMemoryManagementSupported, number_),
      "cuDeviceGetAttribute");
  if (supported == 0) {
    throw DeviceUnavailable(gpu + " (" + name_ +
                            ") has no virtual memory management, without which weights cannot be "
                            "streamed to it (some virtual GPUs and emulations lack it). Use "
                            "device=\"cpu\"");
  }
  const auto error = driver_->cuDevicePrimaryCtxRetain(&handle_, number_);
  if (error == cuda::kDeviceUnavailable) {
    throw DeviceUnavailable(gpu + " (" + name_ +
                            ") is in use by another process, alone: " + driver_->describe(error) +
                            ". Wait for it, or nvidia-smi -c 0 lets several in, " + kUseCpu);
  }
  if (error == cuda::kOutOfMemory) {
    throw OutOfMemory(gpu + " (" + name_ + ") has no memory left for this process: " +
                      driver_->describe(error) + ". nvidia-smi shows who uses it");
  }
  require(error, "cuDevicePrimaryCtxRetain");
}

CudaContext::~CudaContext() {
  if (!forked()) driver_->cuDevicePrimaryCtxRelease(number_);
}

bool CudaContext::forked() const noexcept { return fork_generation != fork_generation_; }

bool CudaContext::lost() const {
  const std::lock_guard lock(mutex_);
  return !lost_by_.empty();
}

void CudaContext::check(cuda::Result result, const char* operation, const char* function) const {
  if (result == cuda::kSuccess) return;
  std::string message = std::string(operation) + ": " + function + " failed on GPU " +
                        std::to_string(index_) + " (" + name_ + "): " + driver_->describe(result);
  if (CudaDriver::loses_context(result)) {
    const std::lock_guard lock(mutex_);
    const bool first = lost_by_.empty();
    if (first) lost_by_ = std::string(function) + ", " + driver_->describe(result);
    throw DeviceError(message +
                      ". This process's CUDA context is lost and every later call fails: some "
                      "kernel, of whatever library, faulted before" +
                      (first ? "" : " (first noticed by " + lost_by_ + ")") +
                      ". Start the process again; CUDA_LAUNCH_BLOCKING=1 names the kernel");
  }
  switch (result) {
    case cuda::kOutOfMemory: {
      std::size_t free = 0;
      std::size_t total = 0;
      if (driver_->cuMemGetInfo(&free, &total) == cuda::kSuccess) {
        message += "; " + format_bytes(free) + " of " + format_bytes(total) + " are free";
      }
      throw OutOfMemory(message);
    }
    case cuda::kDeinitialized:
      throw DeviceError(message + ". The process is ending, and the driver has ended before");
    case cuda::kNotInitialized:
      throw DeviceError(message + ". Most likely " + kForked);
    case cuda::kInvalidContext:
      throw DeviceError(message + ". Was the GPU reset (cudaDeviceReset) while it was in use?");
    default:
      throw DeviceError(message);
  }
}

CudaContext::Guard::Guard(const CudaContext& context) : context_(context) {
  if (context.forked()) throw DeviceError(std::string("GPU: ") + kForked);
  const char* function = nullptr;
  const cuda::Result result = enter(function);
  context.check(result, "context", function);
}

CudaContext::Guard::Guard(const CudaContext& context, std::nothrow_t) : context_(context) {
  const char* function = nullptr;
  if (context.forked()) return;
  static_cast<void>(CudaDriver::insist([&] { return enter(function); }));
}

cuda::Result CudaContext::Guard::enter(const char*& function) {
  const CudaDriver& driver = *context_.driver_;
  cuda::ContextHandle current = nullptr;
  function = "cuCtxGetCurrent";
  cuda::Result result = driver.cuCtxGetCurrent(&current);
  if (result == cuda::kSuccess && current != context_.handle_) {
    function = "cuCtxPushCurrent";
    result = driver.cuCtxPushCurrent(context_.handle_);
    pushed_ = result == cuda::kSuccess;
  }
  entered_ = result == cuda::kSuccess;
  return result;
}

CudaContext::Guard::~Guard() {
  cuda::ContextHandle ours = nullptr;
  if (pushed_) CudaDriver::insist([&] { return context_.driver_->cuCtxPopCurrent(&ours); });
}

}  // namespace trae_mem
