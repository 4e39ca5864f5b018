// All that is known about memory, and the lock around it. No thread waits for a stream while it
// holds the lock.
#pragma once

#include <condition_variable>
#include <mutex>
#include <vector>

#include "address_space.h"
#include "host_memory.h"
#include "task.h"

namespace simgpu {

struct Books {
  std::mutex mutex;
  std::condition_variable use_ended;
  AddressSpace space;
  HostMemory host;
  std::vector<const Task*> running;  // tasks that touch memory right now
};

Books& books();

}  // namespace simgpu
