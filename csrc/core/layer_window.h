// Slots and windows: K slots of physical memory, and the fixed addresses that alias them.
//
// [Note: packed slots] Slots have the exact size of the largest unit and lie one behind the
// other in the arena's pages, so the arena rounds up to whole pages once, not once a slot. A
// slot may begin and end inside a page; its windows then map that page too and begin at the
// same offset in it. Two slots share such a page, never a byte.
#pragma once

#include <cstddef>
#include <memory>

#include "address_range.h"
#include "page_pool.h"

namespace trae_mem {

// A unit's fixed device addresses, mapped onto one slot for as long as the window lives.
class LayerWindow {
 public:
  LayerWindow(std::shared_ptr<Device> device, const PageList& pages, std::size_t offset,
              std::size_t bytes);

  [[nodiscard]] Address address() const noexcept { return range_.begin() + offset_in_page_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::size_t offset_in_page_;  // where the slot begins in its first page
  std::size_t bytes_;
  AddressRange range_;
};

// The physical memory of `count` slots of `slot_bytes` each. Must outlive its windows.
class SlotArena {
 public:
  static constexpr std::size_t kAlignment = 256;  // of a slot, as of every tensor in a pack

  // Rounds `slot_bytes` up to the alignment. Throws OutOfMemory when the pool has no room.
  SlotArena(PagePool& pool, std::size_t slot_bytes, std::size_t count);

  // `bytes`: of the unit, at most slot_bytes().
  [[nodiscard]] std::unique_ptr<LayerWindow> window(std::size_t slot, std::size_t bytes) const;
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }

 private:
  std::shared_ptr<Device> device_;
  std::size_t slot_bytes_;
  std::size_t count_;
  PageList pages_;
};

}  // namespace trae_mem
