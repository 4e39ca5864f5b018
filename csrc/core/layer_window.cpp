#include "layer_window.h"

#include <string>
#include <utility>

#include "error.h"

namespace trae_mem {

LayerWindow::LayerWindow(std::shared_ptr<Device> device, const PageList& pages, std::size_t offset,
                         std::size_t bytes)
    : offset_in_page_(offset % kPageBytes),
      bytes_(bytes),
      range_(std::move(device), offset_in_page_ + bytes) {
  const std::size_t first = offset / kPageBytes;
  for (std::size_t page = 0; page * kPageBytes < range_.bytes(); ++page) {
    range_.map(page * kPageBytes, kPageBytes, pages.pages().at(first + page));
  }
}

SlotArena::SlotArena(PagePool& pool, std::size_t slot_bytes, std::size_t count)
    : device_(pool.device()),
      slot_bytes_((slot_bytes + kAlignment - 1) / kAlignment * kAlignment),
      count_(count),
      pages_(pool.take(slot_bytes_ * count)) {}

std::unique_ptr<LayerWindow> SlotArena::window(std::size_t slot, std::size_t bytes) const {
  if (slot >= count_ || bytes > slot_bytes_) {
    throw InvalidArgument("window: slot " + std::to_string(slot) + " of " + std::to_string(count_) +
                          " with " + format_bytes(bytes) + " in slots of " +
                          format_bytes(slot_bytes_));
  }
  return std::make_unique<LayerWindow>(device_, pages_, slot * slot_bytes_, bytes);
}

}  // namespace trae_mem
