#include "simgpu/kernels/queue.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <future>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace trae_mem::simgpu {
namespace {

constexpr int kErrorAssert = 710;  // cudaErrorAssert

// Torch's tables of kernels are destroyed while the process ends, and streams run on until the
// simulator, which was loaded before torch, is destroyed too.
struct Ending {
  std::shared_mutex mutex;  // shared: by running work
  bool begun = false;

  static Ending& instance() {
    static Ending& ending = *std::make_unique<Ending>().release();  // outlives everything
    return ending;
  }
};

struct Task {
  void* stream;
  std::string name;
  std::function<void()> work;

  void run() {
    const std::shared_lock<std::shared_mutex> lock(Ending::instance().mutex);
    if (Ending::instance().begun) return;
    try {
      work();
    } catch (const std::exception& error) {
      const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
      const std::string what = torch_error ? torch_error->what_without_backtrace() : error.what();
      simgpu_abort(stream, kErrorAssert, "kernel error", (name + " failed: " + what).c_str());
    }
  }
};

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

// Torch looks at the device's state and throws the error that users know.
[[noreturn]] void throw_device_error(const c10::Stream& stream, const std::string& name, int code) {
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeStream(stream);
  TORCH_CHECK(false, "CUDA error: ", name, " could not be queued (cudaError_t ", code, ")");
}

void launch(const c10::Stream& stream, const std::string& name, std::function<void()> work,
            const std::vector<simgpu_range>& ranges) {
  void* handle = stream.native_handle();
  auto task = std::make_unique<Task>(Task{handle, name, std::move(work)});
  const auto run = [](void* data) { static_cast<Task*>(data)->run(); };
  const auto destroy = [](void* data) {
    const std::unique_ptr<Task> ended(static_cast<Task*>(data));
  };
  // From here on the task is the stream's, which destroys it in any case.
  Task* given = task.release();
  const int code =
      simgpu_launch(handle, name.c_str(), run, destroy, given, ranges.data(), ranges.size());
  if (code != 0) throw_device_error(stream, name, code);
}

}  // namespace

void stop_running_work() {
  const std::unique_lock<std::shared_mutex> lock(Ending::instance().mutex);
  Ending::instance().begun = true;
}

void queue_work(c10::Device device, const std::string& name, std::function<void()> work,
                const std::vector<simgpu_range>& ranges) {
  launch(current_stream(device), name, std::move(work), ranges);
}

void wait_for_queued_work(c10::Device device, const std::string& name,
                          const std::vector<simgpu_range>& ranges) {
  const c10::Stream stream = current_stream(device);
  struct Marker {
    std::promise<void> gone;  // broken with the marker: the work has been destroyed, run or not
    std::shared_ptr<bool> ran = std::make_shared<bool>(false);
  };
  auto marker = std::make_shared<Marker>();
  const std::future<void> gone = marker->gone.get_future();
  const std::shared_ptr<bool> ran = marker->ran;
  launch(stream, name, [kept = std::move(marker)] { *kept->ran = true; }, ranges);
  gone.wait();
  if (!*ran) throw_device_error(stream, name, kErrorAssert);
}

}  // namespace trae_mem::simgpu
