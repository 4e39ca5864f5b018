// What a device offers to the streamer and the allocator: addresses, physical pages, ordered
// work, events. The smallest interface that both RAM (HostDevice) and an NVIDIA GPU (CudaDevice)
// can serve.
//
// Order. A *stream* runs its work in the order of submission. An *event* marks a point in a
// stream; `wait` makes another stream wait for that point without blocking the host. The
// stream `kCallerStream` is where the caller computes: on a GPU the default stream, on a
// HostDevice the calling thread itself, so that waiting there does block.
//
// Errors. Misuse and refused calls throw at once. Work that fails later (a copy, a read) marks
// the next event recorded on its stream; whoever waits for that event on the host gets the
// exception, and the stream goes on with the work behind it. A failure travels with the event to
// a stream that waits for it.
//
// [Note: reads and waits] A GPU cannot be told that a file could not be read: it would compute with
// what is there. So on a device whose streams are not the host's own, `wait` for an event behind a
// copy from a ByteSource blocks the calling thread until the source has been read (not until the
// device has copied it) and throws what a read threw. Copies from memory never block a wait.
//
// Threads. All methods may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace trae_mem {

using Address = std::uintptr_t;               // a virtual address of the device
enum class PageHandle : std::uint64_t {};     // physical memory, mapped or not
enum class StreamHandle : std::uintptr_t {};  // an ordered queue of work
enum class EventHandle : std::uintptr_t {};   // a point in a stream

inline constexpr StreamHandle kCallerStream{0};
inline constexpr std::size_t kPageBytes = std::size_t{2} << 20;  // the word "page" of the design

struct DeviceInfo {
  std::string name;         // "host", "NVIDIA A10"
  int index;                // of the GPU, as torch counts; -1: the host
  std::size_t total_bytes;  // physical memory, or the limit that was set for it
  std::size_t free_bytes;   // of it, not used by anybody
  std::size_t used_bytes;   // created and not yet released through this device
};

// Bytes that are produced piece by piece while they are loaded, from a file for example.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Writes the bytes [offset, offset + out.size()) to `out`; called on a worker thread, which may
  // be the driver's: no call of a device in here. May run before the work in front of the copy.
  virtual void read(std::size_t offset, std::span<std::byte> out) const = 0;
};

// Host memory of exactly the size asked for, from which a device copies at full speed.
class HostBuffer {
 public:
  virtual ~HostBuffer() = default;
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
};

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual DeviceInfo info() const = 0;

  // --- addresses and physical memory; sizes and addresses are multiples of kPageBytes --------
  virtual Address reserve(std::size_t bytes) = 0;
  virtual void free_addresses(Address address, std::size_t bytes) = 0;
  virtual PageHandle create(std::size_t bytes) = 0;
  // A released handle lives on while it is mapped.
  virtual void release(PageHandle handle) = 0;
  // Maps the whole handle, readable and writable; one handle may be mapped at many addresses.
  virtual void map(Address address, std::size_t bytes, PageHandle handle) = 0;
  // Only whole mappings can be unmapped. No work on the range may be pending.
  virtual void unmap(Address address, std::size_t bytes) = 0;

  // --- streams and events ---------------------------------------------------------------------
  virtual StreamHandle create_stream() = 0;
  virtual void destroy_stream(StreamHandle stream) = 0;  // after its work is done
  virtual void synchronize(StreamHandle stream) = 0;     // blocks; failures stay with the events
  virtual EventHandle create_event(bool timed) = 0;      // timed: `time_ns` tells when
  virtual void destroy_event(EventHandle event) = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // Records a timed event for its time alone: failures of the work before it stay with the stream.
  virtual void mark(EventHandle event, StreamHandle stream) = 0;
  // `stream` waits for the last record of `event`; for an event never recorded, for nothing.
  // The host waits for the reads of sources only: see the note above.
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  [[nodiscard]] virtual bool query(EventHandle event) const = 0;  // true: done, or never recorded
  virtual void synchronize(EventHandle event) = 0;  // blocks; throws what the work threw
  // When the stream passed the last record of a timed event, on the clock of now_ns(). Nothing: it
  // has not, or the time is not known yet. Never blocks.
  [[nodiscard]] virtual std::optional<std::int64_t> time_ns(EventHandle event) const = 0;

  // --- work, in the order of its stream -------------------------------------------------------
  virtual void copy_to_device(Address to, const void* from, std::size_t bytes,
                              StreamHandle stream) = 0;
  virtual void copy_to_device(Address to, std::shared_ptr<const ByteSource> from, std::size_t bytes,
                              StreamHandle stream) = 0;
  // On a GPU blocks unless `to` lies in a buffer of allocate_host.
  virtual void copy_to_host(void* to, Address from, std::size_t bytes, StreamHandle stream) = 0;
  virtual void fill(Address to, std::uint8_t value, std::size_t bytes, StreamHandle stream) = 0;
  virtual void run(std::function<void()> work, StreamHandle stream) = 0;

  // Hints about a mapped range that aliases others: compute is about to touch it, or will not
  // touch it before the next load. Where page-table entries cost memory, they come and go here.
  virtual void prepare(Address address, std::size_t bytes, StreamHandle stream) = 0;
  virtual void rest(Address address, std::size_t bytes, StreamHandle stream) = 0;

  // --- host memory ----------------------------------------------------------------------------
  virtual std::unique_ptr<HostBuffer> allocate_host(std::size_t bytes) = 0;
};

// A stream of its own, destroyed with its owner. The device must outlive it.
class Stream {
 public:
  explicit Stream(Device& device) : device_(device), handle_(device.create_stream()) {}
  ~Stream() { device_.destroy_stream(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] StreamHandle handle() const noexcept { return handle_; }

 private:
  Device& device_;
  StreamHandle handle_;
};

// An event of its own, destroyed with its owner. The device must outlive it.
class Event {
 public:
  explicit Event(Device& device, bool timed = false)
      : device_(&device), handle_(device.create_event(timed)) {}
  ~Event() {
    if (device_ != nullptr) device_->destroy_event(handle_);
  }
  Event(Event&& other) noexcept : device_(other.device_), handle_(other.handle_) {
    other.device_ = nullptr;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Event& operator=(Event&&) = delete;
  [[nodiscard]] EventHandle handle() const noexcept { return handle_; }

 private:
  Device* device_;  // null once moved from
  EventHandle handle_;
};

}  // namespace trae_mem
