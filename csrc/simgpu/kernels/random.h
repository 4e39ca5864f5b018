// Random numbers on the simulated GPU.
//
// A CUDA generator is a seed and an offset; each kernel that draws takes both and moves the offset
// on. Here the pair seeds a CPU generator that serves one call. So `torch.cuda.get_rng_state`,
// `manual_seed`, `fork_rng` and checkpointing's `preserve_rng_state` reproduce what they should,
// and the process's CPU generator is never touched. The numbers are not those of a GPU.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>

namespace trae_mem::simgpu {

// A CPU generator for one call; moves `given`, or else the device's default generator, on.
// Throws if `given` is not a CUDA generator.
at::Generator draw_generator(const std::optional<at::Generator>& given, c10::Device device);

// A generator for a run whose numbers nobody sees.
at::Generator scratch_generator();

// While it lives, the process's default CPU generator gives `generator`'s numbers. For operators
// that take no generator; holds a lock, so that two of them do not mix.
class BorrowedDefaultGenerator {
 public:
  explicit BorrowedDefaultGenerator(const at::Generator& generator);
  ~BorrowedDefaultGenerator();
  BorrowedDefaultGenerator(const BorrowedDefaultGenerator&) = delete;
  BorrowedDefaultGenerator& operator=(const BorrowedDefaultGenerator&) = delete;

 private:
  at::Tensor saved_;
};

}  // namespace trae_mem::simgpu
