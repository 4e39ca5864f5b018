// Two pinned buffers through which bytes reach a GPU that it cannot copy from where they are: bytes
// of a ByteSource, and host memory that could not be pinned.
//
//   reading stream:  --wait freed[i]--> [host code fills buffer i] --filled[i]-->
//   caller's stream:                            --wait filled[i]--> [copy of buffer i]
//   --freed[i]-->
//
// Chunk by chunk the two buffers take turns, so that one is filled while the other is copied. All
// of it is queued at once; nothing here waits on the host. One ring serves all streams: chunks are
// filled in the order of their submission, so a stream that is held up holds up those behind it.
//
// Thread-safe. Destroyed only when its streams are at rest.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "cuda_handles.h"
#include "device.h"
#include "host_calls.h"
#include "pinned_memory.h"

namespace trae_mem {

class StagingRing {
 public:
  // Throws DeviceError if no memory can be pinned, and what the driver throws.
  StagingRing(std::shared_ptr<const CudaContext> context, PinnedMemory& pinned,
              std::shared_ptr<HostCalls> calls, std::size_t buffer_bytes);

  // Queues the copy, under a Guard. The result is finished when the whole source was read, with
  // what a read threw; the rest of the copy then moves bytes without meaning.
  std::shared_ptr<const Completion> copy(Address to, std::shared_ptr<const ByteSource> from,
                                         std::size_t bytes, cuda::StreamPointer stream);
  // The same from memory, which is read behind the work that is in the stream now.
  void copy(Address to, const void* from, std::size_t bytes, cuda::StreamPointer stream);
  // Waits until nothing is under way in the buffers. Under a Guard.
  void synchronize() noexcept;

 private:
  // Writes the bytes from `offset` on to `out`, on the driver's thread; must not throw.
  using Fill = std::function<void(std::size_t offset, std::span<std::byte> out)>;
  struct Stage {
    std::unique_ptr<HostBuffer> buffer;
    CudaEvent filled;
    CudaEvent freed;
    bool used = false;  // `freed` was recorded
  };

  void submit(Address to, std::size_t bytes, cuda::StreamPointer stream, const Fill& fill);
  void submit_chunk(Stage& stage, Address to, std::size_t offset, std::size_t bytes,
                    cuda::StreamPointer stream, const Fill& fill);

  const std::shared_ptr<const CudaContext> context_;
  const CudaDriver& driver_;
  const std::shared_ptr<HostCalls> calls_;
  const std::size_t buffer_bytes_;
  std::mutex mutex_;  // guards all below
  CudaStream reading_;
  CudaEvent entry_;  // where a copy from memory begins in the caller's stream
  std::array<Stage, 2> stages_;
  std::size_t next_ = 0;
};

}  // namespace trae_mem
