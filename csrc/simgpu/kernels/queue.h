// Putting work on the current stream of a device, and waiting for what is queued there.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "simgpu/simgpu.h"

namespace trae_mem::simgpu {

// Queues `work`, which may throw: then the device fails for good, with `name` in the message.
// `ranges` is the device memory that it touches. Throws torch's own error if the device has failed.
void queue_work(c10::Device device, const std::string& name, std::function<void()> work,
                const std::vector<simgpu_range>& ranges);

// Blocks until the work that is queued has run and `ranges` were found accessible behind it.
// Throws torch's own error if they were not or the device has failed.
void wait_for_queued_work(c10::Device device, const std::string& name,
                          const std::vector<simgpu_range>& ranges);

// Waits for the work that runs just now; what is queued will never run. For the process's end.
void stop_running_work();

}  // namespace trae_mem::simgpu
