#include "host_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"
#include "options.h"

#ifndef MADV_POPULATE_READ  // Linux 5.14; only a hint: before it, pages fault in one by one
#define MADV_POPULATE_READ 22
#endif

namespace trae_mem {
namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;
// Throttled copies go in pieces, so that the link is shared fairly and a long copy is smooth.
constexpr std::size_t kLinkPieceBytes = std::size_t{1} << 20;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

void require_whole_pages(const char* what, Address address, std::size_t bytes) {
  if (bytes == 0 || bytes % kPageBytes != 0 || address % kPageBytes != 0) {
    throw InvalidArgument(std::string(what) + ": " + std::to_string(bytes) +
                          " bytes are not whole pages of 2 MiB");
  }
}

// An address range of its own that faults when touched.
void* map_inaccessible(void* address, std::size_t bytes, int more_flags) {
  return mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | more_flags,
              -1, 0);
}

// The smallest range of whole operating-system pages around [address, address + bytes).
std::pair<Address, std::size_t> around(Address address, std::size_t bytes) {
  static const auto kSystemPage = static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
  const Address begin = address / kSystemPage * kSystemPage;
  const Address end = (address + bytes + kSystemPage - 1) / kSystemPage * kSystemPage;
  return {begin, end - begin};
}

class MappedHostBuffer final : public HostBuffer {
 public:
  explicit MappedHostBuffer(std::size_t bytes) : bytes_(bytes) {
    void* memory = mmap(nullptr, std::max<std::size_t>(bytes, 1), kReadWrite,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw OutOfMemory(with_errno("host memory: no room for " + format_bytes(bytes)));
    }
    data_ = static_cast<std::byte*>(memory);
  }
  ~MappedHostBuffer() override { munmap(data_, std::max<std::size_t>(bytes_, 1)); }
  [[nodiscard]] std::byte* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace

HostDeviceOptions HostDeviceOptions::from_environment() {
  return {.link_bytes_per_second = option_number("link_bytes_per_second"),
          .faults = option_text("faults"),
          .random_delay_us = option_number("random_delay_us"),
          .seed = option_number("seed")};
}

HostDevice::HostDevice(HostDeviceOptions options)
    : options_(std::move(options)),
      faults_(options_.faults),
      link_(options_.link_bytes_per_second),
      memory_(options_.memory_bytes),
      random_(options_.seed) {}

HostDevice::~HostDevice() {
  streams_.clear();  // joins their threads, which still write to pages
  for (const auto& [address, bytes] : reservations_) munmap(pointer(address), bytes);
}

DeviceInfo HostDevice::info() const {
  const std::lock_guard lock(mutex_);
  const std::size_t capacity = memory_.capacity();
  const std::size_t used = memory_.used();
  return {"host", -1, capacity, capacity - used, used};
}

// --- addresses and physical memory ------------------------------------------------------------

Address HostDevice::reserve(std::size_t bytes) {
  require_whole_pages("reserve", 0, bytes);
  faults_.check("reserve");
  // mmap aligns to 4 KiB: reserve a page more and give the ends back.
  void* raw = map_inaccessible(nullptr, bytes + kPageBytes, 0);
  if (raw == MAP_FAILED) {
    throw DeviceError(with_errno("reserve: no addresses for " + format_bytes(bytes)));
  }
  const auto begin = reinterpret_cast<Address>(raw);
  const Address address = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (address > begin) munmap(raw, address - begin);
  munmap(pointer(address + bytes), begin + kPageBytes - address);
  const std::lock_guard lock(mutex_);
  reservations_[address] = bytes;
  return address;
}

void HostDevice::free_addresses(Address address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto reservation = reservations_.find(address);
  if (reservation == reservations_.end() || reservation->second != bytes) {
    throw InvalidArgument("free_addresses: not a reservation");
  }
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + bytes) {
    throw InvalidArgument("free_addresses: pages are still mapped there");
  }
  munmap(pointer(address), bytes);
  reservations_.erase(reservation);
}

PageHandle HostDevice::create(std::size_t bytes) {
  require_whole_pages("create", 0, bytes);
  faults_.check("create");
  const std::lock_guard lock(mutex_);
  return memory_.create(bytes);
}

void HostDevice::release(PageHandle handle) {
  const std::lock_guard lock(mutex_);
  memory_.release(handle);
}

bool HostDevice::is_reserved(Address address, std::size_t bytes) const {
  auto reservation = reservations_.upper_bound(address);
  if (reservation == reservations_.begin()) return false;
  --reservation;
  return address + bytes <= reservation->first + reservation->second;
}

void HostDevice::map(Address address, std::size_t bytes, PageHandle handle) {
  require_whole_pages("map", address, bytes);
  faults_.check("map");
  const std::lock_guard lock(mutex_);
  std::shared_ptr<HostMemory::Pages> pages = memory_.find(handle);
  if (pages == nullptr) throw InvalidArgument("map: not a page handle");
  if (pages->bytes != bytes) throw InvalidArgument("map: not the whole handle");
  if (!is_reserved(address, bytes)) throw InvalidArgument("map: the addresses are not reserved");
  const auto next = mappings_.lower_bound(address);
  const bool overlaps_next = next != mappings_.end() && next->first < address + bytes;
  const bool overlaps_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (overlaps_next || overlaps_previous) throw InvalidArgument("map: already mapped there");
  memory_.map(address, *pages);
  mappings_[address] = Mapping{bytes, std::move(pages)};
}

void HostDevice::unmap(Address address, std::size_t bytes) {
  require_whole_pages("unmap", address, bytes);
  const std::lock_guard lock(mutex_);
  Address position = address;
  auto mapping = mappings_.find(address);
  for (auto next = mapping; position < address + bytes; ++next) {
    if (next == mappings_.end() || next->first != position) break;
    position += next->second.bytes;
  }
  if (position != address + bytes) {
    throw InvalidArgument("unmap: only whole mappings can be unmapped");
  }
  if (map_inaccessible(pointer(address), bytes, MAP_FIXED) == MAP_FAILED) {
    throw DeviceError(with_errno("unmap: " + format_bytes(bytes)));
  }
  while (mapping != mappings_.end() && mapping->first < address + bytes) {
    memory_.unmapped(*mapping->second.pages);
    mapping = mappings_.erase(mapping);
  }
}

// --- streams and events -----------------------------------------------------------------------

StreamHandle HostDevice::create_stream() {
  faults_.check("create_stream");
  auto stream = std::make_shared<HostStream>([this] { random_delay(); });
  const std::lock_guard lock(mutex_);
  const auto id = static_cast<std::uintptr_t>(next_id_++);
  streams_[id] = std::move(stream);
  return StreamHandle{id};
}

std::shared_ptr<HostStream> HostDevice::find_stream(StreamHandle stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(static_cast<std::uintptr_t>(stream));
  if (found == streams_.end()) throw InvalidArgument("not a stream of this device");
  return found->second;
}

std::shared_ptr<Completion> HostDevice::find_completion(EventHandle event) const {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(static_cast<std::uintptr_t>(event));
  if (found == events_.end()) throw InvalidArgument("not an event of this device");
  return found->second;
}

void HostDevice::destroy_stream(StreamHandle stream) {
  // Destroyed, and so joined, without the lock.
  const std::shared_ptr<HostStream> found = find_stream(stream);
  const std::lock_guard lock(mutex_);
  streams_.erase(static_cast<std::uintptr_t>(stream));
}

void HostDevice::synchronize(StreamHandle stream) {
  if (stream != kCallerStream) find_stream(stream)->synchronize();
}

EventHandle HostDevice::create_event(bool /*timed*/) {  // all are
  faults_.check("create_event");
  const std::lock_guard lock(mutex_);
  const auto id = static_cast<std::uintptr_t>(next_id_++);
  events_[id] = nullptr;
  return EventHandle{id};
}

void HostDevice::destroy_event(EventHandle event) {
  const std::lock_guard lock(mutex_);
  if (events_.erase(static_cast<std::uintptr_t>(event)) == 0) {
    throw InvalidArgument("not an event of this device");
  }
}

void HostDevice::record(EventHandle event, StreamHandle stream) {
  faults_.check("record");
  static_cast<void>(find_completion(event));  // throws for an unknown event
  auto completion = std::make_shared<Completion>();
  if (stream == kCallerStream) {
    completion->finish(nullptr);
  } else {
    find_stream(stream)->record_into(completion);
  }
  const std::lock_guard lock(mutex_);
  events_[static_cast<std::uintptr_t>(event)] = std::move(completion);
}

void HostDevice::mark(EventHandle event, StreamHandle stream) {
  faults_.check("mark");
  static_cast<void>(find_completion(event));
  auto completion = std::make_shared<Completion>();
  submit(stream, [completion] { completion->finish(nullptr); });
  const std::lock_guard lock(mutex_);
  events_[static_cast<std::uintptr_t>(event)] = std::move(completion);
}

void HostDevice::wait(StreamHandle stream, EventHandle event) {
  faults_.check("wait");
  const std::shared_ptr<Completion> completion = find_completion(event);
  if (completion == nullptr) return;
  if (stream == kCallerStream) {
    completion->wait_or_throw();
  } else {
    // As on a GPU, a failure travels with the event: the waiting stream's next event has it too.
    find_stream(stream)->push([completion] { completion->wait_or_throw(); });
  }
}

bool HostDevice::query(EventHandle event) const {
  const std::shared_ptr<Completion> completion = find_completion(event);
  return completion == nullptr || completion->finished();
}

void HostDevice::synchronize(EventHandle event) {
  if (const auto completion = find_completion(event)) completion->wait_or_throw();
}

std::optional<std::int64_t> HostDevice::time_ns(EventHandle event) const {
  const std::shared_ptr<Completion> completion = find_completion(event);
  return completion == nullptr ? std::nullopt : completion->finished_ns();
}

// --- work -------------------------------------------------------------------------------------

void HostDevice::submit(StreamHandle stream, std::function<void()> task) {
  if (stream == kCallerStream) {
    task();
  } else {
    find_stream(stream)->push(std::move(task));
  }
}

std::vector<std::span<std::byte>> HostDevice::pieces(Address address, std::size_t bytes) const {
  std::vector<std::span<std::byte>> result;
  const std::lock_guard lock(mutex_);
  while (bytes > 0) {
    auto mapping = mappings_.upper_bound(address);
    if (mapping == mappings_.begin() ||
        std::prev(mapping)->first + std::prev(mapping)->second.bytes <= address) {
      throw InvalidArgument("the range is not mapped: " + format_bytes(bytes) + " missing");
    }
    --mapping;
    const std::size_t skipped = address - mapping->first;
    const std::size_t piece = std::min(bytes, mapping->second.bytes - skipped);
    std::byte* begin = memory_.base_bytes(*mapping->second.pages).data() + skipped;
    if (!result.empty() && result.back().data() + result.back().size() == begin) {
      result.back() = {result.back().data(), result.back().size() + piece};
    } else {
      result.emplace_back(begin, piece);
    }
    address += piece;
    bytes -= piece;
  }
  return result;
}

void HostDevice::transfer(
    const std::vector<std::span<std::byte>>& to,
    const std::function<void(std::size_t, std::span<std::byte>)>& write_piece) {
  faults_.check("copy");
  std::size_t offset = 0;
  // Once: a sleep that ends late must not make the link slower than it was set.
  const auto begin = std::chrono::steady_clock::now();
  for (const std::span<std::byte> whole : to) {
    const std::size_t step = options_.link_bytes_per_second != 0 ? kLinkPieceBytes : whole.size();
    for (std::size_t done = 0; done < whole.size(); done += step) {
      const std::size_t bytes = std::min(step, whole.size() - done);
      write_piece(offset, whole.subspan(done, bytes));
      link_.pace(bytes, begin);
      offset += bytes;
    }
  }
}

void HostDevice::copy_to_device(Address to, const void* from, std::size_t bytes,
                                StreamHandle stream) {
  const auto* source = static_cast<const std::byte*>(from);
  submit(stream, [this, source, target = pieces(to, bytes)] {
    transfer(target, [source](std::size_t offset, std::span<std::byte> out) {
      std::memcpy(out.data(), source + offset, out.size());
    });
  });
}

void HostDevice::copy_to_device(Address to, std::shared_ptr<const ByteSource> from,
                                std::size_t bytes, StreamHandle stream) {
  submit(stream, [this, from = std::move(from), target = pieces(to, bytes)] {
    transfer(target,
             [&from](std::size_t offset, std::span<std::byte> out) { from->read(offset, out); });
  });
}

void HostDevice::copy_to_host(void* to, Address from, std::size_t bytes, StreamHandle stream) {
  auto* target = static_cast<std::byte*>(to);
  submit(stream, [this, target, source = pieces(from, bytes)] {
    transfer(source, [target](std::size_t offset, std::span<std::byte> in) {
      std::memcpy(target + offset, in.data(), in.size());
    });
  });
}

void HostDevice::fill(Address to, std::uint8_t value, std::size_t bytes, StreamHandle stream) {
  submit(stream, [value, target = pieces(to, bytes)] {
    for (const std::span<std::byte> piece : target) {
      std::memset(piece.data(), value, piece.size());
    }
  });
}

void HostDevice::run(std::function<void()> work, StreamHandle stream) {
  submit(stream, std::move(work));
}

void HostDevice::advise(Address address, std::size_t bytes, int advice, StreamHandle stream) {
  static_cast<void>(pieces(address, bytes));  // throws for a range that is not mapped
  submit(stream, [this, range = around(address, bytes), advice] {
    const auto started = std::chrono::steady_clock::now();
    madvise(pointer(range.first), range.second, advice);
    link_.excuse(std::chrono::steady_clock::now() - started);
  });
}

void HostDevice::prepare(Address address, std::size_t bytes, StreamHandle stream) {
  advise(address, bytes, MADV_POPULATE_READ, stream);
}

void HostDevice::rest(Address address, std::size_t bytes, StreamHandle stream) {
  advise(address, bytes, MADV_DONTNEED, stream);  // shared memory: the bytes stay
}

std::unique_ptr<HostBuffer> HostDevice::allocate_host(std::size_t bytes) {
  faults_.check("allocate_host");
  return std::make_unique<MappedHostBuffer>(bytes);
}

void HostDevice::random_delay() {
  if (options_.random_delay_us == 0) return;
  std::uint64_t delay = 0;
  {
    const std::lock_guard lock(random_mutex_);
    delay = std::uniform_int_distribution<std::uint64_t>(0, options_.random_delay_us)(random_);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(delay));
}

void HostDevice::check_invariants() const {
  const std::lock_guard lock(mutex_);
  std::map<const HostMemory::Pages*, std::size_t> mapped;
  for (const auto& [address, mapping] : mappings_) {
    if (!is_reserved(address, mapping.bytes)) throw Error("a mapping lies outside reservations");
    ++mapped[mapping.pages.get()];
  }
  memory_.check_invariants(std::move(mapped));
}

}  // namespace trae_mem
