// A GPU's primary context: the one that torch uses too, so that streams, memory and events of both
// sides mean the same.
//
// Every call of the driver that needs a context runs under a Guard, which makes this one current
// for the calling thread and leaves the thread as it was. Results are checked here, so that every
// message names the operation, the driver's function, the GPU and, where it is known, the way out.
//
// Forks. A child has neither the driver's threads nor its memory: every call throws, and whatever
// is destroyed in a child is left to the operating system.
#pragma once

#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "cuda_driver.h"

namespace trae_mem {

class CudaContext {
 public:
  // Throws DeviceUnavailable where there is no driver, no such GPU or no virtual memory management.
  CudaContext(std::shared_ptr<const CudaDriver> driver, int index);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  [[nodiscard]] const CudaDriver& driver() const noexcept { return *driver_; }
  [[nodiscard]] int index() const noexcept { return index_; }
  [[nodiscard]] cuda::DeviceNumber number() const noexcept { return number_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] bool forked() const noexcept;  // this process is not the one that opened the GPU
  [[nodiscard]] bool lost() const;             // an error was met after which no call succeeds

  // Throws for anything but success: OutOfMemory or DeviceError. `operation`: a method of Device.
  void check(cuda::Result result, const char* operation, const char* function) const;

  class Guard {
   public:
    explicit Guard(const CudaContext& context);         // throws DeviceError
    Guard(const CudaContext& context, std::nothrow_t);  // for destructors: see entered()
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    [[nodiscard]] bool entered() const noexcept { return entered_; }

   private:
    cuda::Result enter(const char*& function);

    const CudaContext& context_;
    bool entered_ = false;
    bool pushed_ = false;
  };

 private:
  void open();
  void require_pages() const;

  std::shared_ptr<const CudaDriver> driver_;
  const int index_;
  const unsigned fork_generation_;
  cuda::DeviceNumber number_ = 0;
  cuda::ContextHandle handle_ = nullptr;
  std::string name_;  // "NVIDIA A10"
  mutable std::mutex mutex_;
  mutable std::string lost_by_;  // the first error after which no call succeeds; empty: none
};

}  // namespace trae_mem
