#include "kernels_by_address.h"

#include <mutex>
#include <unordered_map>

#include "process.h"

namespace simgpu {
namespace {

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
};

Kernels& kernels() {
  static Kernels& made = immortal<Kernels>();
  return made;
}

}  // namespace

void add_kernel(const void* host_function, const char* name) {
  const std::lock_guard lock(kernels().mutex);
  kernels().names[host_function] = name;
}

const char* kernel_name(const void* host_function) {
  const std::lock_guard lock(kernels().mutex);
  const auto found = kernels().names.find(host_function);
  return found == kernels().names.end() ? "an unregistered kernel" : found->second;
}

}  // namespace simgpu
