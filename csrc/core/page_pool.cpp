#include "page_pool.h"

#include <limits>
#include <set>
#include <string>
#include <utility>

#include "error.h"

namespace trae_mem {

PageList::~PageList() {
  if (pool_ != nullptr) pool_->put_back(pages_);
}

PagePool::PagePool(std::shared_ptr<Device> device, std::size_t limit_bytes)
    : device_(std::move(device)),
      limit_pages_(limit_bytes != 0 ? limit_bytes / kPageBytes
                                    : std::numeric_limits<std::size_t>::max()) {}

PagePool::~PagePool() {
  try {
    trim();
  } catch (const Error&) {
    // The device is gone or broken; there is nobody to tell.
  }
}

PageList PagePool::take(std::size_t bytes) {
  const std::size_t count = (bytes + kPageBytes - 1) / kPageBytes;
  const std::lock_guard lock(mutex_);
  if (count > limit_pages_ || used_ > limit_pages_ - count) {
    throw OutOfMemory("page pool: no room for " + format_bytes(count * kPageBytes) + ": " +
                      format_bytes(used_ * kPageBytes) + " of " +
                      format_bytes(limit_pages_ * kPageBytes) + " in use");
  }
  free_.reserve(used_ + std::max(count, free_.size()));
  while (free_.size() < count) free_.push_back(device_->create(kPageBytes));
  const auto first = free_.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<PageHandle> pages(first, free_.end());
  free_.erase(first, free_.end());
  used_ += count;
  return {shared_from_this(), std::move(pages)};
}

void PagePool::put_back(std::vector<PageHandle>& pages) noexcept {
  const std::lock_guard lock(mutex_);
  free_.insert(free_.end(), pages.begin(), pages.end());
  used_ -= pages.size();
  pages.clear();
}

void PagePool::trim() {
  const std::lock_guard lock(mutex_);
  while (!free_.empty()) {
    const PageHandle page = free_.back();
    free_.pop_back();
    device_->release(page);
  }
}

std::size_t PagePool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_ * kPageBytes;
}

std::size_t PagePool::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_.size() * kPageBytes;
}

void PagePool::check_invariants() const {
  const std::lock_guard lock(mutex_);
  if (std::set<PageHandle>(free_.begin(), free_.end()).size() != free_.size()) {
    throw Error("a page is free twice");
  }
  if (free_.capacity() < free_.size() + used_) throw Error("no room to take pages back");
  if (used_ > limit_pages_) throw Error("more pages in use than the limit");
}

}  // namespace trae_mem
