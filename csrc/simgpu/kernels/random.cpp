#include "simgpu/kernels/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <mutex>

namespace trae_mem::simgpu {
namespace {

// A GPU's kernels move the offset by at least this much.
constexpr uint64_t kOffsetStep = 4;

// The finaliser of splitmix64: neighbouring offsets give unrelated seeds.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

std::mutex& borrowing() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

at::Generator draw_generator(const std::optional<at::Generator>& given, c10::Device device) {
  at::Generator generator =
      given.has_value() && given->defined() ? *given : at::globalContext().defaultGenerator(device);
  TORCH_CHECK(generator.device().is_cuda(),
              "Expected a 'cuda' device type for generator but found '", generator.device().type(),
              "'");
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t seed = generator.current_seed();
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + kOffsetStep);
  return at::detail::createCPUGenerator(mix(mix(seed) ^ offset));
}

at::Generator scratch_generator() { return at::detail::createCPUGenerator(0); }

BorrowedDefaultGenerator::BorrowedDefaultGenerator(const at::Generator& generator) {
  borrowing().lock();
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(shared.mutex());
  saved_ = shared.get_state();
  shared.set_current_seed(generator.current_seed());
}

BorrowedDefaultGenerator::~BorrowedDefaultGenerator() {
  {
    at::Generator shared = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(shared.mutex());
    shared.set_state(saved_);
  }
  borrowing().unlock();
}

}  // namespace trae_mem::simgpu
