#include "pinned_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "error.h"

namespace trae_mem {
namespace {

// " (ulimit -l is 64.00 KiB)"; empty without a limit.
std::string memory_lock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return " (the limit of locked memory, ulimit -l, is " + format_bytes(limit.rlim_cur) + ")";
}

}  // namespace

class PinnedMemory::Buffer final : public HostBuffer {
 public:
  Buffer(std::shared_ptr<PinnedMemory> owner, std::size_t bytes)
      : owner_(std::move(owner)), bytes_(bytes) {
    // Not reserved: registering it needs every page anyway, and a simulated GPU needs none.
    void* memory = mmap(nullptr, mapped_bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw OutOfMemory(with_errno("host memory: no room for " + format_bytes(bytes)));
    }
    data_ = static_cast<std::byte*>(memory);
  }
  ~Buffer() override {
    const CudaContext& context = *owner_->context_;
    if (pinned_ && !context.forked()) {
      owner_->strike_off(data_);
      const CudaContext::Guard guard(context, std::nothrow);
      if (guard.entered()) {
        CudaDriver::insist([&] { return context.driver().cuMemHostUnregister(data_); });
      }
    }
    munmap(data_, mapped_bytes());
  }
  [[nodiscard]] std::byte* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }

  cuda::Result pin() {
    const CudaContext& context = *owner_->context_;
    const CudaContext::Guard guard(context);
    const cuda::Result result =
        context.driver().cuMemHostRegister(data_, bytes_, cuda::kHostRegisterPortable);
    if (result != cuda::kSuccess) return result;
    pinned_ = true;
    owner_->enlist(data_, bytes_);
    return cuda::kSuccess;
  }

 private:
  [[nodiscard]] std::size_t mapped_bytes() const { return std::max<std::size_t>(bytes_, 1); }

  const std::shared_ptr<PinnedMemory> owner_;
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
  bool pinned_ = false;
};

PinnedMemory::PinnedMemory(std::shared_ptr<const CudaContext> context)
    : context_(std::move(context)) {}

std::unique_ptr<HostBuffer> PinnedMemory::allocate(std::size_t bytes, bool must_pin) {
  auto buffer = std::make_unique<Buffer>(shared_from_this(), bytes);
  if (bytes == 0) return buffer;
  const cuda::Result result = buffer->pin();
  if (result == cuda::kSuccess) return buffer;
  if (CudaDriver::loses_context(result) || result == cuda::kDeinitialized) {
    context_->check(result, "allocate_host", "cuMemHostRegister");
  }
  const std::string why = reason(bytes, result);
  if (must_pin) throw DeviceError(why);
  const std::lock_guard lock(mutex_);
  if (note_.empty()) note_ = why;
  return buffer;
}

std::string PinnedMemory::reason(std::size_t bytes, cuda::Result result) const {
  return "host memory of " + format_bytes(bytes) +
         " cannot be pinned: cuMemHostRegister: " + context_->driver().describe(result) +
         memory_lock_limit();
}

void PinnedMemory::enlist(std::byte* memory, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  pinned_[reinterpret_cast<std::uintptr_t>(memory)] = bytes;
}

void PinnedMemory::strike_off(std::byte* memory) noexcept {
  const std::lock_guard lock(mutex_);
  pinned_.erase(reinterpret_cast<std::uintptr_t>(memory));
}

bool PinnedMemory::covers(const void* memory, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::lock_guard lock(mutex_);
  const auto next = pinned_.upper_bound(begin);
  if (next == pinned_.begin()) return false;
  const auto& [address, size] = *std::prev(next);
  const std::size_t offset = begin - address;
  return offset <= size && bytes <= size - offset;
}

std::string PinnedMemory::note() const {
  const std::lock_guard lock(mutex_);
  return note_;
}

}  // namespace trae_mem
