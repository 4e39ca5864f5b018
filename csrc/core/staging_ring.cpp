#include "staging_ring.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "error.h"
#include "options.h"

namespace trae_mem {
namespace {

// What the chunks of one source share.
class Reading {
 public:
  Reading(std::shared_ptr<const ByteSource> source, std::size_t bytes)
      : source_(std::move(source)), left_(bytes) {}

  void read(std::size_t offset, std::span<std::byte> out) {
    if (!completion_->finished()) {  // behind a failure there is nothing to read for
      try {
        source_->read(offset, out);
      } catch (...) {
        completion_->finish(std::current_exception());
      }
    }
    left_ -= out.size();
    if (left_ > 0) return;
    source_.reset();
    if (!completion_->finished()) completion_->finish(nullptr);
  }
  [[nodiscard]] std::shared_ptr<const Completion> completion() const { return completion_; }

 private:
  std::shared_ptr<const ByteSource> source_;
  std::size_t left_;  // bytes that no chunk has had; used by one thread, that of the stream
  std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
};

std::unique_ptr<HostBuffer> pinned_buffer(PinnedMemory& pinned, std::size_t bytes) {
  try {
    return pinned.allocate(bytes, /*must_pin=*/true);
  } catch (const DeviceError& error) {
    throw DeviceError("staging: " + std::string(error.what()) +
                      ". Without two such buffers neither files nor memory that is not pinned can "
                      "be copied to the GPU: raise the limit (ulimit -l unlimited; in a container "
                      "--ulimit memlock=-1), or set " +
                      option_variable("staging_bytes") +
                      "=1048576, or use "
                      "device=\"cpu\"");
  }
}

}  // namespace

StagingRing::StagingRing(std::shared_ptr<const CudaContext> context, PinnedMemory& pinned,
                         std::shared_ptr<HostCalls> calls, std::size_t buffer_bytes)
    : context_(std::move(context)),
      driver_(context_->driver()),
      calls_(std::move(calls)),
      buffer_bytes_(buffer_bytes),
      reading_(context_),
      entry_(context_, /*timed=*/false),
      stages_{{{pinned_buffer(pinned, buffer_bytes), {context_, false}, {context_, false}},
               {pinned_buffer(pinned, buffer_bytes), {context_, false}, {context_, false}}}} {}

std::shared_ptr<const Completion> StagingRing::copy(Address to,
                                                    std::shared_ptr<const ByteSource> from,
                                                    std::size_t bytes, cuda::StreamPointer stream) {
  const auto reading = std::make_shared<Reading>(std::move(from), bytes);
  const std::lock_guard lock(mutex_);
  submit(to, bytes, stream,
         [reading](std::size_t offset, std::span<std::byte> out) { reading->read(offset, out); });
  return reading->completion();
}

void StagingRing::copy(Address to, const void* from, std::size_t bytes,
                       cuda::StreamPointer stream) {
  const std::lock_guard lock(mutex_);
  context_->check(driver_.cuEventRecord(entry_.pointer(), stream), "copy", "cuEventRecord");
  context_->check(driver_.cuStreamWaitEvent(reading_.pointer(), entry_.pointer(), 0), "copy",
                  "cuStreamWaitEvent");
  submit(
      to, bytes, stream,
      [memory = static_cast<const std::byte*>(from)](std::size_t offset, std::span<std::byte> out) {
        std::memcpy(out.data(), memory + offset, out.size());
      });
}

void StagingRing::synchronize() noexcept {
  const std::lock_guard lock(mutex_);
  CudaDriver::insist([this] { return driver_.cuStreamSynchronize(reading_.pointer()); });
  for (const Stage& stage : stages_) {
    if (!stage.used) continue;
    CudaDriver::insist([&] { return driver_.cuEventSynchronize(stage.freed.pointer()); });
  }
}

void StagingRing::submit(Address to, std::size_t bytes, cuda::StreamPointer stream,
                         const Fill& fill) {
  for (std::size_t offset = 0; offset < bytes; offset += buffer_bytes_) {
    submit_chunk(stages_[next_], to, offset, std::min(buffer_bytes_, bytes - offset), stream, fill);
    next_ = (next_ + 1) % stages_.size();
  }
}

void StagingRing::submit_chunk(Stage& stage, Address to, std::size_t offset, std::size_t bytes,
                               cuda::StreamPointer stream, const Fill& fill) {
  const auto check = [this](cuda::Result result, const char* function) {
    context_->check(result, "copy", function);
  };
  if (stage.used) {
    check(driver_.cuStreamWaitEvent(reading_.pointer(), stage.freed.pointer(), 0),
          "cuStreamWaitEvent");
  }
  const std::span<std::byte> out(stage.buffer->data(), bytes);
  calls_->launch(reading_.pointer(), [fill, offset, out] { fill(offset, out); }, "copy");
  check(driver_.cuEventRecord(stage.filled.pointer(), reading_.pointer()), "cuEventRecord");
  check(driver_.cuStreamWaitEvent(stream, stage.filled.pointer(), 0), "cuStreamWaitEvent");
  check(driver_.cuMemcpyHtoDAsync(to + offset, out.data(), bytes, stream), "cuMemcpyHtoDAsync");
  const cuda::Result recorded = driver_.cuEventRecord(stage.freed.pointer(), stream);
  if (recorded != cuda::kSuccess) {
    // Nothing tells when the buffer is free again, so wait for it here; then no chunk needs to.
    CudaDriver::insist([&] { return driver_.cuStreamSynchronize(stream); });
    stage.used = false;
    check(recorded, "cuEventRecord");
  }
  stage.used = true;
}

}  // namespace trae_mem
