#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <vector>

#include "address_space.h"
#include "books.h"
#include "device.h"
#include "host_memory.h"
#include "objects.h"
#include "process.h"
#include "streams.h"

namespace simgpu {
namespace {

std::string span_text(std::uintptr_t address, std::size_t bytes) {
  char text[80];
  std::snprintf(text, sizeof text, "[0x%zx, +%.2f MiB)", static_cast<std::size_t>(address),
                static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string call_text() {
  const Call* const call = Call::current();
  if (call == nullptr) return "a call";
  return std::string(call->name()) + " from " + call->caller().name;
}

// Reports work that is queued or running on the range.
void check_pending(const char* kind, std::uintptr_t address, std::size_t bytes) {
  for (const std::shared_ptr<Stream>& stream : all_streams()) {
    std::string pending;
    stream->find_pending(address, bytes, [&pending](const Task& task) {
      pending = task.origin.name + " queued by " + task.origin.library->name;
    });
    if (pending.empty()) continue;
    report(kind, call_text() + " on " + span_text(address, bytes) + " while " + pending +
                     " is pending on a stream of device " +
                     std::to_string(stream->device().ordinal()) +
                     ". Wait for it (an event, a stream) first.");
    return;
  }
}

// Waits until nothing that runs touches the range; what is only queued does not count.
void wait_for_users(std::unique_lock<std::mutex>& lock, std::uintptr_t address, std::size_t bytes) {
  books().use_ended.wait(lock, [&] {
    return std::none_of(books().running.begin(), books().running.end(), [&](const Task* task) {
      return std::any_of(task->ranges.begin(), task->ranges.end(),
                         [&](const Range& range) { return range.overlaps(address, bytes); });
    });
  });
}

}  // namespace

Books& books() {
  static Books& made = immortal<Books>();
  return made;
}

Code reserve_addresses(std::uintptr_t* address, std::size_t bytes, std::size_t alignment) {
  const std::lock_guard lock(books().mutex);
  return books().space.reserve(address, bytes, alignment);
}

Code free_addresses(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard lock(books().mutex);
  const Code code = books().space.free(address, bytes);
  const auto& reservations = books().space.reservations();
  const auto found = reservations.find(address);
  if (code != Code::kOk && found != reservations.end() && found->second.bytes == bytes) {
    report(kind::kMappedRangeFreed,
           call_text() + ": " + span_text(address, bytes) + " still has mappings. Unmap first.");
  }
  return code;
}

Code create_physical(std::uint64_t* handle, std::size_t bytes, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return Code::kInvalidDevice;
  if (bytes == 0 || bytes % kGranularity != 0) return Code::kInvalidValue;
  std::shared_ptr<Allocation> made = device(ordinal).memory().create(bytes);
  if (made == nullptr) return Code::kOutOfMemory;
  const std::lock_guard lock(books().mutex);
  *handle = books().space.add_handle(std::move(made));
  return Code::kOk;
}

Code release_physical(std::uint64_t handle) {
  const std::lock_guard lock(books().mutex);
  const Code code = books().space.release(handle);
  if (code != Code::kOk) {
    const bool existed = books().space.existed(handle);
    report(existed ? kind::kDoubleFree : kind::kInvalidHandle,
           call_text() + ": memory handle " + std::to_string(handle) +
               (existed ? " was released before." : " never existed."));
  }
  return code;
}

Code retain_physical(std::uint64_t* handle, std::uintptr_t address) {
  const std::lock_guard lock(books().mutex);
  return books().space.retain(handle, address);
}

Code device_of_physical(int* device, std::uint64_t handle) {
  const std::lock_guard lock(books().mutex);
  const std::shared_ptr<Allocation> memory = books().space.physical(handle);
  if (memory == nullptr) return Code::kInvalidValue;
  *device = memory->device();
  return Code::kOk;
}

Code map_physical(std::uintptr_t address, std::size_t bytes, std::size_t offset,
                  std::uint64_t handle) {
  if (offset != 0) return Code::kInvalidValue;
  const std::lock_guard lock(books().mutex);
  return books().space.map(address, bytes, handle);
}

Code unmap(std::uintptr_t address, std::size_t bytes) {
  std::unique_lock lock(books().mutex);
  bool partial = false;
  const Code code = books().space.check_unmap(address, bytes, &partial);
  if (partial) {
    report(kind::kPartialUnmap, call_text() + ": " + span_text(address, bytes) +
                                    " cuts a mapping. Only whole mappings can be unmapped.");
  }
  if (code != Code::kOk) return code;
  check_pending(kind::kUnmapPending, address, bytes);
  wait_for_users(lock, address, bytes);
  books().space.unmap(address, bytes);
  return Code::kOk;
}

Code set_access(std::uintptr_t address, std::size_t bytes, int device, bool allowed) {
  if (device < 0 || device >= device_count()) return Code::kInvalidDevice;
  const std::lock_guard lock(books().mutex);
  return books().space.set_access(address, bytes, device, allowed);
}

Code has_access(bool* allowed, std::uintptr_t address, int device) {
  const std::lock_guard lock(books().mutex);
  const auto mapping = books().space.mapping_at(address);
  if (mapping == books().space.mappings().end()) return Code::kInvalidValue;
  *allowed = (mapping->second.access >> device & 1) != 0;
  return Code::kOk;
}

Code allocate(std::uintptr_t* address, std::size_t bytes) {
  std::shared_ptr<Allocation> made = device(current_device()).memory().create(rounded(bytes));
  if (made == nullptr) return Code::kOutOfMemory;
  const std::lock_guard lock(books().mutex);
  return books().space.allocate(address, std::move(made));
}

Code free_allocation(std::uintptr_t address) {
  if (address == 0) return Code::kOk;
  int owner = 0;
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(books().mutex);
    if (!books().space.is_allocation(address)) {
      const bool before = books().space.was_allocation(address);
      report(before ? kind::kDoubleFree : kind::kInvalidHandle,
             call_text() + ": " + span_text(address, 0) +
                 (before ? " was freed before." : " is no allocation's begin."));
      return Code::kInvalidValue;
    }
    const auto mapping = books().space.mapping_at(address);
    owner = mapping->second.memory->device();
    bytes = mapping->second.bytes;
  }
  synchronize_device(device(owner));
  std::unique_lock lock(books().mutex);
  check_pending(kind::kFreePending, address, bytes);
  wait_for_users(lock, address, bytes);
  if (books().space.is_allocation(address)) books().space.free_allocation(address);
  return Code::kOk;
}

Code memory_info(std::size_t* free, std::size_t* total) {
  const PhysicalMemory& memory = device(current_device()).memory();
  const std::uint64_t capacity = memory.capacity();
  if (free != nullptr) *free = capacity - std::min(capacity, memory.used());
  if (total != nullptr) *total = capacity;
  return Code::kOk;
}

Code allocate_host(std::uintptr_t* address, std::size_t bytes, unsigned flags) {
  if (bytes == 0) {
    *address = 0;
    return Code::kOk;
  }
  void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return Code::kOutOfMemory;
  *address = reinterpret_cast<std::uintptr_t>(made);
  const std::lock_guard lock(books().mutex);
  return books().host.add(*address, bytes, flags, true);
}

namespace {

Code give_up_host(std::uintptr_t address, bool allocated, Code missing) {
  std::unique_lock lock(books().mutex);
  const Registration* const found = books().host.beginning_at(address);
  if (found == nullptr || found->allocated != allocated) {
    if (allocated) {
      const bool before = books().host.was_allocated(address);
      report(before ? kind::kDoubleFree : kind::kInvalidHandle,
             call_text() + ": " + span_text(address, 0) +
                 (before ? " was freed before." : " is no host allocation's begin."));
    }
    return missing;
  }
  const std::size_t bytes = found->bytes;
  check_pending(kind::kFreePending, address, bytes);
  wait_for_users(lock, address, bytes);
  if (books().host.beginning_at(address) == nullptr) return missing;
  books().host.remove(address);
  if (allocated) munmap(reinterpret_cast<void*>(address), bytes);
  return Code::kOk;
}

}  // namespace

Code free_host(std::uintptr_t address) {
  if (address == 0) return Code::kOk;
  return give_up_host(address, true, Code::kInvalidValue);
}

Code register_host(std::uintptr_t address, std::size_t bytes, unsigned flags) {
  if (address == 0 || bytes == 0) return Code::kInvalidValue;
  const std::lock_guard lock(books().mutex);
  if (books().space.is_device(address) || !is_mapped_in_process(address, bytes)) {
    return Code::kInvalidValue;
  }
  return books().host.add(address, bytes, flags, false);
}

Code unregister_host(std::uintptr_t address) {
  return give_up_host(address, false, Code::kHostNotRegistered);
}

AddressFacts facts_of(std::uintptr_t address) {
  const std::lock_guard lock(books().mutex);
  AddressFacts facts;
  if (books().space.is_device(address)) {
    facts.place = Place::kDevice;
    const auto mapping = books().space.mapping_at(address);
    facts.mapped = mapping != books().space.mappings().end();
    if (!facts.mapped) return facts;
    facts.device = mapping->second.memory->device();
    facts.base = mapping->first;
    facts.bytes = mapping->second.bytes;
    facts.buffer = mapping->first;
  } else if (const Registration* found = books().host.covering(address, 1)) {
    facts.place = Place::kPinned;
    facts.base = books().host.base_of(address);
    facts.bytes = found->bytes;
    facts.flags = found->flags;
    facts.buffer = found->id;
  }
  return facts;
}

Range range_of(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard lock(books().mutex);
  if (books().space.is_device(address)) return {address, bytes, Place::kDevice, 0};
  if (const Registration* found = books().host.covering(address, bytes)) {
    return {address, bytes, Place::kPinned, found->id};
  }
  return {address, bytes, Place::kPageable, 0};
}

bool is_mapped(const Range& range) {
  const std::lock_guard lock(books().mutex);
  return books().space.check(range, 0, true) != Verdict::kNotMapped;
}

namespace {

struct Finding {
  const char* kind = nullptr;  // null: fine
  std::string text;
};

Finding examine(const Range& range, const Device& device, bool peers) {
  if (range.bytes == 0 || range.place == Place::kPageable) return {};
  const std::string span = span_text(range.address, range.bytes);
  if (range.place == Place::kPinned) {
    const Registration* const now = books().host.covering(range.address, range.bytes);
    if (now == nullptr || now->id != range.registration) {
      return {kind::kUnregisteredCopy,
              span + " was registered when it was queued, and is no longer"};
    }
    if (!is_mapped_in_process(range.address, range.bytes)) {
      return {kind::kFreePending, span + " was unmapped (munmap) while it is registered"};
    }
    return {};
  }
  switch (books().space.check(range, device.ordinal(), peers)) {
    case Verdict::kNotMapped:
      return {kind::kIllegalAddress, span + " is not all mapped"};
    case Verdict::kNoAccess:
      return {kind::kMissingAccess, span + " is mapped, but device " +
                                        std::to_string(device.ordinal()) +
                                        " was given no access to it (cuMemSetAccess)"};
    case Verdict::kFine:
      break;
  }
  return {};
}

}  // namespace

bool begin_use(const Task& task, Device& device) {
  Finding finding;
  {
    const std::lock_guard lock(books().mutex);
    if (device.failure() != Code::kOk) return false;  // since the stream looked
    for (const Range& range : task.ranges) {
      finding = examine(range, device, task.peers);
      if (finding.kind != nullptr) break;
    }
    if (finding.kind == nullptr) {
      books().running.push_back(&task);
      return true;
    }
  }
  // Reported first: whoever meets the failed context finds the reason.
  report(finding.kind,
         task.origin.name + " from " + task.origin.library->name + ": " + finding.text +
             ". The context of device " + std::to_string(device.ordinal()) +
             " fails from now on with an illegal address (700).",
         task.origin.stack);
  device.fail(Code::kIllegalAddress);
  return false;
}

void wait_until_nothing_runs() {
  std::unique_lock lock(books().mutex);
  books().use_ended.wait_for(lock, std::chrono::seconds(5), [] { return books().running.empty(); });
}

void end_use(const Task& task) {
  {
    const std::lock_guard lock(books().mutex);
    std::erase(books().running, &task);
  }
  books().use_ended.notify_all();
}

}  // namespace simgpu
