#include "cuda_device.h"

#include <algorithm>
#include <utility>

#include "error.h"
#include "options.h"

namespace trae_mem {
namespace {

// Set in the handles of our own streams: no pointer of a user's process has it.
constexpr std::uintptr_t kOwnStream = std::uintptr_t{1} << 63;
// How long host work is waited for before the driver is asked whether it can still happen.
constexpr std::chrono::milliseconds kPatience{100};

}  // namespace

CudaDeviceOptions CudaDeviceOptions::from_environment(int index) {
  return {.index = index,
          .staging_bytes = static_cast<std::size_t>(option_number("staging_bytes", 4096))};
}

CudaDevice::CudaDevice(CudaDeviceOptions options, std::shared_ptr<const CudaDriver> driver)
    : options_(options),
      context_(std::make_shared<const CudaContext>(std::move(driver), options.index)),
      driver_(context_->driver()),
      calls_(std::make_shared<HostCalls>(context_)),
      pinned_(std::make_shared<PinnedMemory>(context_)),
      memory_(context_, options.memory_bytes) {}

CudaDevice::~CudaDevice() { drain(); }

void CudaDevice::drain() noexcept {
  if (context_->forked()) return;
  bool lost = context_->lost();
  if (const CudaContext::Guard guard(*context_, std::nothrow); guard.entered()) {
    for (const auto& [handle, stream] : streams_) {
      const cuda::StreamPointer pointer = stream->pointer();
      const auto synchronize = [&] { return driver_.cuStreamSynchronize(pointer); };
      lost = CudaDriver::loses_context(CudaDriver::insist(synchronize)) || lost;
    }
    if (staging_ != nullptr) staging_->synchronize();
    if (clock_ != nullptr) clock_->synchronize();
  }
  if (lost) calls_->abandon();
}

DeviceInfo CudaDevice::info() const {
  const CudaContext::Guard guard(*context_);
  std::size_t free = 0;
  std::size_t total = 0;
  context_->check(driver_.cuMemGetInfo(&free, &total), "info", "cuMemGetInfo");
  const std::size_t used = memory_.used_bytes();
  if (options_.memory_bytes != 0) {
    total = memory_.capacity();
    free = std::min(free, total - used);
  }
  return {context_->name(), context_->index(), total, free, used};
}

std::string CudaDevice::pinning_note() const {
  const std::string why = pinned_->note();
  if (why.empty()) return why;
  return why + ". Copies of it go through two pinned buffers of " +
         format_bytes(options_.staging_bytes) +
         ", at a part of the link's speed. More lockable memory mends it: ulimit -l unlimited; in "
         "a container --ulimit memlock=-1";
}

// --- addresses and physical memory ------------------------------------------------------------

Address CudaDevice::reserve(std::size_t bytes) { return memory_.reserve(bytes); }

void CudaDevice::free_addresses(Address address, std::size_t bytes) {
  memory_.free_addresses(address, bytes);
}

PageHandle CudaDevice::create(std::size_t bytes) { return memory_.create(bytes); }

void CudaDevice::release(PageHandle handle) { memory_.release(handle); }

void CudaDevice::map(Address address, std::size_t bytes, PageHandle handle) {
  memory_.map(address, bytes, handle);
}

void CudaDevice::unmap(Address address, std::size_t bytes) { memory_.unmap(address, bytes); }

// --- streams ----------------------------------------------------------------------------------

StreamHandle CudaDevice::create_stream() {
  const CudaContext::Guard guard(*context_);
  auto stream = std::make_shared<const CudaStream>(context_);
  const std::lock_guard lock(mutex_);
  const std::uintptr_t handle = kOwnStream | static_cast<std::uintptr_t>(next_id_++);
  streams_[handle] = std::move(stream);
  return StreamHandle{handle};
}

cuda::StreamPointer CudaDevice::find(StreamHandle stream,
                                     std::shared_ptr<const CudaStream>& owner) const {
  const auto handle = static_cast<std::uintptr_t>(stream);
  if ((handle & kOwnStream) == 0) return reinterpret_cast<cuda::StreamPointer>(handle);
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) throw InvalidArgument("not a stream of this device");
  owner = found->second;
  return owner->pointer();
}

void CudaDevice::destroy_stream(StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  if (owner == nullptr) throw InvalidArgument("destroy_stream: not a stream of this device");
  const CudaContext::Guard guard(*context_, std::nothrow);
  // Called by destructors: what fails here is met again by whoever uses the device.
  if (guard.entered()) {
    CudaDriver::insist([&] { return driver_.cuStreamSynchronize(pointer); });
  }
  const std::lock_guard lock(mutex_);
  works_.erase(static_cast<std::uintptr_t>(stream));
  streams_.erase(static_cast<std::uintptr_t>(stream));
}

void CudaDevice::synchronize(StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  const CudaContext::Guard guard(*context_);
  context_->check(driver_.cuStreamSynchronize(pointer), "synchronize", "cuStreamSynchronize");
  if (CudaClock* const times = clock()) times->synchronize();
}

CudaClock* CudaDevice::clock() const {
  const std::lock_guard lock(mutex_);
  return clock_.get();
}

// --- events -----------------------------------------------------------------------------------

EventHandle CudaDevice::create_event(bool timed) {
  const CudaContext::Guard guard(*context_);
  auto state = std::make_shared<EventState>(context_, timed);
  const std::lock_guard lock(mutex_);
  if (timed && clock_ == nullptr) clock_ = std::make_unique<CudaClock>(context_, calls_);
  const auto id = static_cast<std::uintptr_t>(next_id_++);
  events_[id] = std::move(state);
  return EventHandle{id};
}

std::shared_ptr<CudaDevice::EventState> CudaDevice::find(EventHandle event) const {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(static_cast<std::uintptr_t>(event));
  if (found == events_.end()) throw InvalidArgument("not an event of this device");
  return found->second;
}

void CudaDevice::destroy_event(EventHandle event) {
  const std::shared_ptr<EventState> state = find(event);  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  events_.erase(static_cast<std::uintptr_t>(event));
}

void CudaDevice::record(EventHandle event, StreamHandle stream) {
  record(event, stream, /*with_work=*/true, "record");
}

void CudaDevice::mark(EventHandle event, StreamHandle stream) {
  record(event, stream, /*with_work=*/false, "mark");
}

void CudaDevice::record(EventHandle event, StreamHandle stream, bool with_work,
                        const char* operation) {
  std::shared_ptr<const CudaStream> owner;
  const std::shared_ptr<EventState> state = find(event);
  const cuda::StreamPointer pointer = find(stream, owner);
  const CudaContext::Guard guard(*context_);
  const std::lock_guard event_lock(state->mutex);
  context_->check(driver_.cuEventRecord(state->event.pointer(), pointer), operation,
                  "cuEventRecord");
  state->recorded = true;
  state->behind.clear();
  if (!with_work) return;
  const std::lock_guard lock(mutex_);
  const auto works = works_.find(static_cast<std::uintptr_t>(stream));
  if (works == works_.end()) return;
  state->behind = std::move(works->second);
  works_.erase(works);
}

void CudaDevice::wait(StreamHandle stream, EventHandle event) {
  std::shared_ptr<const CudaStream> owner;
  const std::shared_ptr<EventState> state = find(event);
  const cuda::StreamPointer pointer = find(stream, owner);
  const CudaContext::Guard guard(*context_);
  HostWorks behind;
  {
    const std::lock_guard event_lock(state->mutex);
    if (!state->recorded) return;
    context_->check(driver_.cuStreamWaitEvent(pointer, state->event.pointer(), 0), "wait",
                    "cuStreamWaitEvent");
    behind = state->behind;
  }
  HostWorks travelling;
  for (const HostWork& work : behind) {
    if (work.is_read) {
      await(work, state->event.pointer(), "wait");
    } else if (!work.completion->finished() || work.completion->error() != nullptr) {
      travelling.push_back(work);
    }
  }
  add_work(stream, travelling);
}

bool CudaDevice::query(EventHandle event) const {
  const std::shared_ptr<EventState> state = find(event);
  const CudaContext::Guard guard(*context_);
  const std::lock_guard event_lock(state->mutex);
  if (!state->recorded) return true;
  const cuda::Result result = driver_.cuEventQuery(state->event.pointer());
  if (result == cuda::kNotReady) return false;
  context_->check(result, "query", "cuEventQuery");
  return true;
}

void CudaDevice::synchronize(EventHandle event) {
  if (!query(event)) {
    const std::shared_ptr<EventState> state = find(event);
    const CudaContext::Guard guard(*context_);
    context_->check(driver_.cuEventSynchronize(state->event.pointer()), "synchronize",
                    "cuEventSynchronize");
  }
  const std::shared_ptr<EventState> state = find(event);
  HostWorks behind;
  {
    const std::lock_guard event_lock(state->mutex);
    behind = state->behind;
  }
  const CudaContext::Guard guard(*context_);
  for (const HostWork& work : behind) await(work, state->event.pointer(), "synchronize");
}

std::optional<std::int64_t> CudaDevice::time_ns(EventHandle event) const {
  const std::shared_ptr<EventState> state = find(event);
  if (!state->timed) throw InvalidArgument("time_ns: not a timed event");
  const CudaContext::Guard guard(*context_);
  const std::lock_guard event_lock(state->mutex);
  if (!state->recorded) return std::nullopt;
  return clock()->host_ns(state->event.pointer());
}

void CudaDevice::add_work(StreamHandle stream, const HostWorks& works) {
  if (works.empty()) return;
  const std::lock_guard lock(mutex_);
  HostWorks& queued = works_[static_cast<std::uintptr_t>(stream)];
  // A stream on which nobody records must not collect what went well.
  std::erase_if(queued, [](const HostWork& work) {
    return work.completion->finished() && work.completion->error() == nullptr;
  });
  queued.insert(queued.end(), works.begin(), works.end());
}

void CudaDevice::await(const HostWork& work, cuda::EventPointer behind,
                       const char* operation) const {
  while (!work.completion->wait_for(kPatience)) {
    const cuda::Result result = driver_.cuEventQuery(behind);
    if (result != cuda::kNotReady) context_->check(result, operation, "cuEventQuery");
  }
  if (const std::exception_ptr failure = work.completion->error()) std::rethrow_exception(failure);
}

// --- work -------------------------------------------------------------------------------------

StagingRing& CudaDevice::staging() {
  const std::lock_guard lock(mutex_);
  if (staging_ == nullptr) {
    staging_ = std::make_unique<StagingRing>(context_, *pinned_, calls_, options_.staging_bytes);
  }
  return *staging_;
}

void CudaDevice::copy_to_device(Address to, const void* from, std::size_t bytes,
                                StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  if (bytes == 0) return;
  memory_.require_mapped(to, bytes);
  const CudaContext::Guard guard(*context_);
  if (pinned_->covers(from, bytes)) {
    context_->check(driver_.cuMemcpyHtoDAsync(to, from, bytes, pointer), "copy",
                    "cuMemcpyHtoDAsync");
  } else {
    staging().copy(to, from, bytes, pointer);
  }
}

void CudaDevice::copy_to_device(Address to, std::shared_ptr<const ByteSource> from,
                                std::size_t bytes, StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  if (bytes == 0) return;
  memory_.require_mapped(to, bytes);
  const CudaContext::Guard guard(*context_);
  add_work(stream, {{staging().copy(to, std::move(from), bytes, pointer), /*is_read=*/true}});
}

void CudaDevice::copy_to_host(void* to, Address from, std::size_t bytes, StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  if (bytes == 0) return;
  memory_.require_mapped(from, bytes);
  const CudaContext::Guard guard(*context_);
  context_->check(driver_.cuMemcpyDtoHAsync(to, from, bytes, pointer), "copy", "cuMemcpyDtoHAsync");
}

void CudaDevice::fill(Address to, std::uint8_t value, std::size_t bytes, StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  if (bytes == 0) return;
  memory_.require_mapped(to, bytes);
  const CudaContext::Guard guard(*context_);
  context_->check(driver_.cuMemsetD8Async(to, value, bytes, pointer), "fill", "cuMemsetD8Async");
}

void CudaDevice::run(std::function<void()> work, StreamHandle stream) {
  std::shared_ptr<const CudaStream> owner;
  const cuda::StreamPointer pointer = find(stream, owner);
  const CudaContext::Guard guard(*context_);
  add_work(stream, {{calls_->run(pointer, std::move(work)), /*is_read=*/false}});
}

void CudaDevice::prepare(Address address, std::size_t bytes, StreamHandle /*stream*/) {
  memory_.require_mapped(address, bytes);
}

void CudaDevice::rest(Address address, std::size_t bytes, StreamHandle /*stream*/) {
  memory_.require_mapped(address, bytes);
}

std::unique_ptr<HostBuffer> CudaDevice::allocate_host(std::size_t bytes) {
  return pinned_->allocate(bytes);
}

void CudaDevice::check_invariants() const {
  memory_.check_invariants();
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, works] : works_) {
    const bool gone = (handle & kOwnStream) != 0 && !streams_.contains(handle);
    if (gone) throw Error("host work of a stream that is gone");
  }
}

}  // namespace trae_mem
