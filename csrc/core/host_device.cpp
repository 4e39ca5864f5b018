#include "host_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"
#include "options.h"

#ifndef MADV_POPULATE_READ  // Linux 5.14; an older kernel answers EINVAL and pages fault in singly
#define MADV_POPULATE_READ 22
#endif

namespace trae_mem {
namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;
// Throttled copies go in pieces, so that the link is shared fairly and a long copy is smooth.
constexpr std::size_t kLinkPieceBytes = std::size_t{1} << 20;

std::size_t machine_memory() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
}

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
  HostDeviceOptions options;
  options.link_bytes_per_second = option_number("link_bytes_per_second");
  options.faults = option_text("faults");
  options.random_delay_us = option_number("random_delay_us");
  options.seed = option_number("seed");
  return options;
}

HostDevice::HostDevice(HostDeviceOptions options)
    : options_(std::move(options)),
      faults_(options_.faults),
      link_(options_.link_bytes_per_second),
      capacity_((options_.memory_bytes != 0 ? options_.memory_bytes : machine_memory()) /
                kPageBytes * kPageBytes),
      random_(options_.seed) {
  if (capacity_ == 0) throw InvalidArgument("host device: its memory must be at least 2 MiB");
  memory_fd_ = memfd_create("trae_mem", MFD_CLOEXEC);
  if (memory_fd_ < 0) throw DeviceError(with_errno("host device: memfd_create"));
  void* base = mmap(nullptr, capacity_, kReadWrite, MAP_SHARED | MAP_NORESERVE, memory_fd_, 0);
  if (base == MAP_FAILED) {
    close(memory_fd_);
    throw DeviceError(with_errno("host device: no addresses for " + format_bytes(capacity_)));
  }
  base_ = static_cast<std::byte*>(base);
}

HostDevice::~HostDevice() {
  streams_.clear();  // joins their threads, which still write to pages
  for (const auto& [address, bytes] : reservations_) munmap(pointer(address), bytes);
  munmap(base_, capacity_);
  close(memory_fd_);
}

DeviceInfo HostDevice::info() const {
  const std::lock_guard lock(mutex_);
  return {"host", capacity_, used_};
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
  if (bytes > capacity_ - used_) {
    throw OutOfMemory("host device: no room for " + format_bytes(bytes) + ": " +
                      format_bytes(used_) + " of " + format_bytes(capacity_) + " in use");
  }
  const std::size_t offset = take_range(bytes);
  used_ += bytes;
  const std::uint64_t id = next_id_++;
  handles_[id] = std::make_shared<Pages>(Pages{offset, bytes, 0, false});
  return PageHandle{id};
}

std::size_t HostDevice::take_range(std::size_t bytes) {
  for (auto range = free_ranges_.begin(); range != free_ranges_.end(); ++range) {
    const auto [offset, length] = *range;
    if (length < bytes) continue;
    free_ranges_.erase(range);
    if (length > bytes) free_ranges_.emplace(offset + bytes, length - bytes);
    return offset;
  }
  // Free ranges that are each too short may add up to enough: a handle is contiguous all the same.
  if (bytes > capacity_ - end_) {
    throw OutOfMemory("host device: no contiguous room for " + format_bytes(bytes));
  }
  if (ftruncate(memory_fd_, static_cast<off_t>(end_ + bytes)) != 0) {
    throw DeviceError(with_errno("create: cannot grow by " + format_bytes(bytes)));
  }
  return std::exchange(end_, end_ + bytes);
}

void HostDevice::give_back_range(std::size_t offset, std::size_t bytes) {
  fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
  // Neighbours become one, and a range at the end gives the file's length back.
  const auto next = free_ranges_.find(offset + bytes);
  if (next != free_ranges_.end()) {
    bytes += next->second;
    free_ranges_.erase(next);
  }
  const auto behind = free_ranges_.lower_bound(offset);
  if (behind != free_ranges_.begin()) {
    const auto previous = std::prev(behind);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      free_ranges_.erase(previous);
    }
  }
  if (offset + bytes == end_) {
    end_ = offset;
  } else {
    free_ranges_.emplace(offset, bytes);
  }
}

void HostDevice::release(PageHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  if (found == handles_.end()) throw InvalidArgument("release: not a page handle");
  found->second->released = true;
  free_if_unused(*found->second);
  handles_.erase(found);
}

void HostDevice::free_if_unused(const Pages& pages) {
  if (!pages.released || pages.mappings > 0) return;
  used_ -= pages.bytes;
  give_back_range(pages.offset, pages.bytes);
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
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  if (found == handles_.end()) throw InvalidArgument("map: not a page handle");
  if (found->second->bytes != bytes) throw InvalidArgument("map: not the whole handle");
  if (!is_reserved(address, bytes)) throw InvalidArgument("map: the addresses are not reserved");
  const auto next = mappings_.lower_bound(address);
  const bool overlaps_next = next != mappings_.end() && next->first < address + bytes;
  const bool overlaps_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (overlaps_next || overlaps_previous) throw InvalidArgument("map: already mapped there");
  if (mmap(pointer(address), bytes, kReadWrite, MAP_SHARED | MAP_FIXED, memory_fd_,
           static_cast<off_t>(found->second->offset)) == MAP_FAILED) {
    throw DeviceError(with_errno("map: " + format_bytes(bytes)));
  }
  ++found->second->mappings;
  mappings_[address] = Mapping{bytes, found->second};
}

void HostDevice::unmap(Address address, std::size_t bytes) {
  require_whole_pages("unmap", address, bytes);
  const std::lock_guard lock(mutex_);
  Address position = address;
  auto mapping = mappings_.find(address);
  for (auto next = mapping; position < address + bytes; ++next) {
    if (next == mappings_.end() || next->first != position) {
      throw InvalidArgument("unmap: only whole mappings can be unmapped");
    }
    position += next->second.bytes;
  }
  if (position != address + bytes) {
    throw InvalidArgument("unmap: only whole mappings can be unmapped");
  }
  if (map_inaccessible(pointer(address), bytes, MAP_FIXED) == MAP_FAILED) {
    throw DeviceError(with_errno("unmap: " + format_bytes(bytes)));
  }
  while (mapping != mappings_.end() && mapping->first < address + bytes) {
    --mapping->second.pages->mappings;
    free_if_unused(*mapping->second.pages);
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

EventHandle HostDevice::create_event() {
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
    std::byte* begin = base_ + mapping->second.pages->offset + skipped;
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

void HostDevice::advise(Address begin, std::size_t length, int advice) {
  const auto started = std::chrono::steady_clock::now();
  madvise(pointer(begin), length, advice);
  link_.excuse(std::chrono::steady_clock::now() - started);
}

void HostDevice::prepare(Address address, std::size_t bytes, StreamHandle stream) {
  static_cast<void>(pieces(address, bytes));  // throws for a range that is not mapped
  const auto [begin, length] = around(address, bytes);
  submit(stream, [this, begin = begin, length = length] {
    // Only a hint: where the kernel does not know the advice, pages fault in one by one.
    advise(begin, length, MADV_POPULATE_READ);
  });
}

void HostDevice::rest(Address address, std::size_t bytes, StreamHandle stream) {
  static_cast<void>(pieces(address, bytes));  // throws for a range that is not mapped
  const auto [begin, length] = around(address, bytes);
  submit(stream, [this, begin = begin, length = length] {
    advise(begin, length, MADV_DONTNEED);  // shared memory: the bytes stay
  });
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
  std::size_t living = 0;
  std::map<const Pages*, std::size_t> mapped;
  for (const auto& [address, mapping] : mappings_) {
    if (!is_reserved(address, mapping.bytes)) throw Error("a mapping lies outside reservations");
    ++mapped[mapping.pages.get()];
  }
  for (const auto& [id, pages] : handles_) mapped.try_emplace(pages.get(), 0);
  for (const auto& [pages, count] : mapped) {
    if (pages->mappings != count) throw Error("a page's count of mappings is wrong");
    living += pages->bytes;
  }
  if (living != used_) throw Error("the count of used bytes is wrong");
  std::size_t free = 0;
  for (const auto& [offset, bytes] : free_ranges_) free += bytes;
  if (free + used_ != end_) throw Error("free and used bytes do not add up");
}

}  // namespace trae_mem
